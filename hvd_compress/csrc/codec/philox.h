// Counter-based noise: Philox 4x32 with ten rounds (Salmon et al., SC 2011).
#ifndef HVDC_CODEC_PHILOX_H_
#define HVDC_CODEC_PHILOX_H_

#include "codec/macros.h"
#include "codec/types.h"

namespace hvdc {
namespace HVDC_ARCH {

HVDC_HD NoiseState MakeNoise(const hvdc_noise& noise) {
  NoiseState state;
  uint32_t key0 = noise.seed, key1 = noise.rank;
  for (int round = 0; round < kPhiloxRounds; ++round) {
    state.keys[2 * round] = key0;
    state.keys[2 * round + 1] = key1;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  state.tensor = noise.tensor;
  state.step_low = static_cast<uint32_t>(noise.step);
  state.step_high = static_cast<uint32_t>(noise.step >> 32);
  return state;
}

// One round in every lane.
template <class V>
HVDC_HD void PhiloxRound(typename V::I* x, uint32_t key0, uint32_t key1) {
  typename V::I high0, low0, high1, low1;
  V::MultiplyWide(x[0], 0xD2511F53u, &high0, &low0);
  V::MultiplyWide(x[2], 0xCD9E8D57u, &high1, &low1);
  x[0] = V::Xor3(high1, x[1], key0);
  x[1] = low1;
  x[2] = V::Xor3(high0, x[3], key1);
  x[3] = low0;
}

// The words of the counters in x[0]: word w of lane l serves element 16 w + l of the tile.
template <class V>
HVDC_HD void PhiloxWords(const NoiseState& noise, typename V::I counter, typename V::I* x) {
  x[0] = counter;
  x[1] = V::SetI(noise.tensor);
  x[2] = V::SetI(noise.step_low);
  x[3] = V::SetI(noise.step_high);
#if defined(__CUDA_ARCH__)
#pragma unroll
#elif defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__)
#pragma GCC unroll 10
#endif
  for (int round = 0; round < kPhiloxRounds; ++round) {
    PhiloxRound<V>(x, noise.keys[2 * round], noise.keys[2 * round + 1]);
  }
}

// An integer in [0, 2**24), as a float.
template <class V>
HVDC_HD typename V::F Uniform(typename V::I word) {
  return V::ToFloat(V::template ShiftRight<8>(word));
}

// Whether something of that probability happens.
template <class V>
HVDC_HD typename V::M Happens(typename V::F uniform, typename V::F probability) {
  return V::Less(uniform, V::Mul(probability, V::Set(0x1p24f)));
}

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CODEC_PHILOX_H_
