// Four neighbouring elements of a tensor, which one thread reads or writes at once. Where all four
// exist and memory is aligned to them (kWhole), that is one access without a condition; so several
// of them can be under way.
#ifndef HVDC_CUDA_QUADS_H_
#define HVDC_CUDA_QUADS_H_

#include <string.h>

#include <type_traits>

#include "codec/cast.h"
#include "cuda/grid.h"
#include "simd/thread.h"

namespace hvdc {
namespace HVDC_ARCH {

constexpr uint32_t kRow = 4 * kWarpSize;  // elements of a warp's quads, side by side

// Aligned, so that shared memory is read and written four elements at a time as well.
struct alignas(16) Quad {
  float v[4];
};

// The type with as many bytes as four elements.
template <size_t size>
struct QuadMemory;
template <>
struct QuadMemory<4> {
  using T = uint4;
};
template <>
struct QuadMemory<2> {
  using T = uint2;
};

// The number of the four elements from position on that lie below count.
__device__ inline uint32_t ValidOf(uint32_t position, uint32_t count) {
  if (position >= count) return 0;
  return count - position < 4 ? count - position : 4;
}

// Calls work with a dtype that is known to the compiler.
template <class Work>
__device__ inline auto WithDtype(int dtype, const Work& work) {
  switch (dtype) {
    case HVDC_DTYPE_FLOAT32:
      return work(std::integral_constant<int, HVDC_DTYPE_FLOAT32>());
    case HVDC_DTYPE_FLOAT16:
      return work(std::integral_constant<int, HVDC_DTYPE_FLOAT16>());
    default:
      return work(std::integral_constant<int, HVDC_DTYPE_BFLOAT16>());
  }
}

// The first valid elements from base + at on, zeros for the others; at is a multiple of four, and
// valid is 4 where kWhole.
template <int kDtype, bool kWhole>
__device__ inline Quad LoadQuadAs(const void* base, uint32_t at, uint32_t valid) {
  using E = Elements<Thread, kDtype>;
  using T = typename E::T;
  using Memory = typename QuadMemory<sizeof(T)>::T;
  const T* from = static_cast<const T*>(base) + at;
  T elements[4] = {};
  if constexpr (kWhole) {
    const Memory memory = *reinterpret_cast<const Memory*>(from);
    memcpy(elements, &memory, sizeof(memory));
  } else {
#pragma unroll
    for (uint32_t k = 0; k < 4; ++k) {
      if (k < valid) elements[k] = from[k];
    }
  }
  Quad quad;
#pragma unroll
  for (int k = 0; k < 4; ++k) quad.v[k] = E::Load(elements + k);
  return quad;
}

template <bool kWhole, class T>
__device__ inline void StoreElements(T* to, uint32_t valid, const T* elements) {
  using Memory = typename QuadMemory<sizeof(T)>::T;
  if constexpr (kWhole) {
    Memory memory;
    memcpy(&memory, elements, sizeof(memory));
    *reinterpret_cast<Memory*>(to) = memory;
  } else {
#pragma unroll
    for (uint32_t k = 0; k < 4; ++k) {
      if (k < valid) to[k] = elements[k];
    }
  }
}

template <int kDtype, bool kWhole>
__device__ inline void StoreQuadAs(void* base, uint32_t at, uint32_t valid, const Quad& quad) {
  using E = Elements<Thread, kDtype>;
  typename E::T elements[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) E::Store(elements + k, quad.v[k]);
  StoreElements<kWhole>(static_cast<typename E::T*>(base) + at, valid, elements);
}

// rounding: a number for each residual; not used where they are float32.
template <int kResidual, bool kWhole>
__device__ inline void StoreResidual(void* base, uint32_t at, uint32_t valid, const Quad& quad,
                                     const uint32_t* rounding) {
  if constexpr (kResidual == HVDC_DTYPE_BFLOAT16) {
    uint16_t elements[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      elements[k] = static_cast<uint16_t>(RoundAtRandom<Thread>(quad.v[k], rounding[k]));
    }
    StoreElements<kWhole>(static_cast<uint16_t*>(base) + at, valid, elements);
  } else {
    StoreQuadAs<kResidual, kWhole>(base, at, valid, quad);
  }
}

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CUDA_QUADS_H_
