// The noise of four neighbouring elements. A counter has numbers for four elements of a tile, which
// stand sixteen apart: where the four threads that have those are in one warp, each computes one
// counter, and they exchange numbers; elsewhere a thread computes four, and uses a number of each.
#ifndef HVDC_CUDA_NOISE_H_
#define HVDC_CUDA_NOISE_H_

#include "codec/philox.h"
#include "codec/rounding.h"
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

// The numbers that round codes: those of the tile's four quarters that a lane's counter has.
struct OfCodes {
  __device__ static void Draw(const NoiseState& noise, uint32_t element, uint32_t lane,
                              uint32_t* numbers) {
    PhiloxWords<Thread>(noise, kLanes * (element / kTile) + lane, numbers);
  }
};

// The same of the numbers that round residuals: two words have them for a tile.
struct OfResiduals {
  __device__ static void Draw(const NoiseState& noise, uint32_t element, uint32_t lane,
                              uint32_t* numbers) {
    uint32_t words[4];
    PhiloxWords<Thread>(RoundingNoise(noise), RoundingCounter(element) + lane, words);
    const bool second = element % kRoundedRow / kTile;
    SplitWord<Thread>(second ? words[2] : words[0], numbers);
    SplitWord<Thread>(second ? words[3] : words[1], numbers + 2);
#pragma unroll
    for (int k = 0; k < 4; ++k) numbers[k] ^= RoundingFlip(element);
  }
};

// Called by all threads of a warp, which have the quads of two tiles in order.
template <class Of>
__device__ inline void DrawTogether(const NoiseState& noise, uint32_t element, uint32_t* numbers) {
  const uint32_t column = element % kLanes, quarter = element % kTile / kLanes;
  Of::Draw(noise, element, column + quarter, numbers);
  TransposeQuarters(numbers);
}

template <class Of>
__device__ inline void DrawAlone(const NoiseState& noise, uint32_t element, uint32_t* numbers) {
  const uint32_t column = element % kLanes, quarter = element % kTile / kLanes;
#pragma unroll
  for (uint32_t k = 0; k < 4; ++k) {
    uint32_t own[4];
    Of::Draw(noise, element, column + k, own);
    const uint32_t low = quarter & 1 ? own[1] : own[0];
    const uint32_t high = quarter & 1 ? own[3] : own[2];
    numbers[k] = quarter & 2 ? high : low;
  }
}

// together: whether DrawTogether may be called.
template <class Of>
__device__ inline void DrawNumbers(const NoiseState& noise, uint32_t element, bool together,
                                   uint32_t* numbers) {
  if (together) {
    DrawTogether<Of>(noise, element, numbers);
  } else {
    DrawAlone<Of>(noise, element, numbers);
  }
}

// What codes and residuals of four elements are rounded with, where they are.
struct QuadNoise {
  Quad uniform;
  uint32_t rounding[4];
};

template <bool kCodes, int kResidual>
__device__ inline QuadNoise NoiseOf(const NoiseState& noise, uint32_t element, bool together) {
  QuadNoise all = {};
  if constexpr (kCodes) {
    uint32_t words[4];
    DrawNumbers<OfCodes>(noise, element, together, words);
#pragma unroll
    for (int k = 0; k < 4; ++k) all.uniform.v[k] = Uniform<Thread>(words[k]);
  }
  if constexpr (kResidual == HVDC_DTYPE_BFLOAT16) {
    DrawNumbers<OfResiduals>(noise, element, together, all.rounding);
  }
  return all;
}

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CUDA_NOISE_H_
