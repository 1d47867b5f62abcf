// The noise of four neighbouring elements. A counter's four words serve elements that stand sixteen
// apart: where the four threads that have those are in one warp, each computes one counter, and
// they exchange words; elsewhere a thread computes four, and uses a word of each.
#ifndef HVDC_CUDA_NOISE_H_
#define HVDC_CUDA_NOISE_H_

#include "codec/philox.h"
#include "cuda/grid.h"
#include "cuda/quads.h"

namespace hvdc {
namespace HVDC_ARCH {

// Word q of the thread in quarter k for word k of the thread in quarter q; a tile's quarters are
// four threads each.
__device__ inline void TransposeQuarters(uint32_t* words) {
#pragma unroll
  for (uint32_t step = 2; step; step /= 2) {
    const bool second = threadIdx.x & 4 * step;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      if (i & step) continue;
      const uint32_t given = second ? words[i] : words[i + step];
      const uint32_t got = __shfl_xor_sync(kFullWarp, given, static_cast<int>(4 * step), kWarpSize);
      words[i] = second ? got : words[i];
      words[i + step] = second ? words[i + step] : got;
    }
  }
}

// Called by all threads of a warp, which have the quads of two tiles in order.
__device__ inline Quad SharedNoise(const NoiseState& noise, uint32_t element) {
  const uint32_t column = element % kLanes, quarter = element % kTile / kLanes;
  uint32_t words[4];
  PhiloxWords<Thread>(noise, kLanes * (element / kTile) + column + quarter, words);
  TransposeQuarters(words);
  Quad uniform;
#pragma unroll
  for (int k = 0; k < 4; ++k) uniform.v[k] = Uniform<Thread>(words[k]);
  return uniform;
}

__device__ inline Quad OwnNoise(const NoiseState& noise, uint32_t element) {
  const uint32_t column = element % kLanes, quarter = element % kTile / kLanes;
  Quad uniform;
#pragma unroll
  for (uint32_t k = 0; k < 4; ++k) {
    uint32_t words[4];
    PhiloxWords<Thread>(noise, kLanes * (element / kTile) + column + k, words);
    const uint32_t low = quarter & 1 ? words[1] : words[0];
    const uint32_t high = quarter & 1 ? words[3] : words[2];
    uniform.v[k] = Uniform<Thread>(quarter & 2 ? high : low);
  }
  return uniform;
}

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CUDA_NOISE_H_
