// Counter-based noise: Philox 4x32 with seven rounds (Salmon et al., SC 2011).
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

// One round in every lane: words stand in the lower halves of lanes of 64 bits, where products need
// not be taken apart.
template <class V>
HVDC_HD void PhiloxRound(typename V::Wide* x, uint32_t key0, uint32_t key1) {
  const typename V::Wide product0 = V::Multiply(x[0], 0xD2511F53u);
  const typename V::Wide product1 = V::Multiply(x[2], 0xCD9E8D57u);
  x[0] = V::XorHigh(product1, x[1], key0);
  x[1] = product1;
  x[2] = V::XorHigh(product0, x[3], key1);
  x[3] = product0;
}

// The words of the counters: word w of lane l serves element 16 w + l of the tile.
template <class V>
HVDC_HD void PhiloxWords(const NoiseState& noise, typename V::I counter, typename V::I* words) {
  typename V::Wide x[4], done[4][V::kWideParts];
  HVDC_UNROLL
  for (int part = 0; part < V::kWideParts; ++part) {
    x[0] = V::Widen(counter, part);
    x[1] = V::Widen(V::SetI(noise.tensor), part);
    x[2] = V::Widen(V::SetI(noise.step_low), part);
    x[3] = V::Widen(V::SetI(noise.step_high), part);
    HVDC_UNROLL
    for (int round = 0; round < kPhiloxRounds; ++round) {
      PhiloxRound<V>(x, noise.keys[2 * round], noise.keys[2 * round + 1]);
    }
    for (int word = 0; word < 4; ++word) done[word][part] = x[word];
  }
  for (int word = 0; word < 4; ++word) words[word] = V::Narrow(done[word]);
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
