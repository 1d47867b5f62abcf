// Four neighbouring elements of a tensor, which one thread reads or writes at once.
#ifndef HVDC_CUDA_QUADS_H_
#define HVDC_CUDA_QUADS_H_

#include <string.h>

#include "codec/cast.h"
#include "simd/thread.h"

namespace hvdc {
namespace HVDC_ARCH {

// Aligned, so that shared memory is read and written four elements at a time as well.
struct alignas(16) Quad {
  float v[4];
};

// As many bytes as four elements take.
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

// How many of the four elements from position on lie below count.
__device__ inline uint32_t ValidOf(uint32_t position, uint32_t count) {
  if (position >= count) return 0;
  return count - position < 4 ? count - position : 4;
}

// The first valid elements from base + at on, zeros for the others. aligned: whether base is, to
// four elements; at is a multiple of four.
template <int kDtype>
__device__ inline Quad LoadQuadAs(const void* base, uint32_t at, uint32_t valid, bool aligned) {
  using E = Elements<Thread, kDtype>;
  using T = typename E::T;
  using Memory = typename QuadMemory<sizeof(T)>::T;
  const T* from = static_cast<const T*>(base) + at;
  T elements[4] = {};
  if (aligned && valid == 4) {
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

template <int kDtype>
__device__ inline void StoreQuadAs(void* base, uint32_t at, uint32_t valid, bool aligned,
                                   const Quad& quad) {
  using E = Elements<Thread, kDtype>;
  using T = typename E::T;
  using Memory = typename QuadMemory<sizeof(T)>::T;
  T* to = static_cast<T*>(base) + at;
  T elements[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) E::Store(elements + k, quad.v[k]);
  if (aligned && valid == 4) {
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

__device__ inline Quad LoadQuad(int dtype, const void* base, uint32_t at, uint32_t valid,
                                bool aligned) {
  switch (dtype) {
    case HVDC_DTYPE_FLOAT32:
      return LoadQuadAs<HVDC_DTYPE_FLOAT32>(base, at, valid, aligned);
    case HVDC_DTYPE_FLOAT16:
      return LoadQuadAs<HVDC_DTYPE_FLOAT16>(base, at, valid, aligned);
    default:
      return LoadQuadAs<HVDC_DTYPE_BFLOAT16>(base, at, valid, aligned);
  }
}

__device__ inline void StoreQuad(int dtype, void* base, uint32_t at, uint32_t valid, bool aligned,
                                 const Quad& quad) {
  switch (dtype) {
    case HVDC_DTYPE_FLOAT32:
      return StoreQuadAs<HVDC_DTYPE_FLOAT32>(base, at, valid, aligned, quad);
    case HVDC_DTYPE_FLOAT16:
      return StoreQuadAs<HVDC_DTYPE_FLOAT16>(base, at, valid, aligned, quad);
    default:
      return StoreQuadAs<HVDC_DTYPE_BFLOAT16>(base, at, valid, aligned, quad);
  }
}

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CUDA_QUADS_H_
