// The first lines of every header of the codecs' mathematics.
//
// HVDC_HD marks functions that the host and a device may both call. HVDC_ARCH is a namespace of the
// including translation unit's own: each is compiled for another instruction set, and an inline
// function that two of them shared would be linked from either one.
#ifndef HVDC_CODEC_MACROS_H_
#define HVDC_CODEC_MACROS_H_

#include <stdint.h>

#if defined(__CUDACC__)
#define HVDC_HD __host__ __device__ __forceinline__
#else
#define HVDC_HD inline __attribute__((always_inline))
#endif

// Before a function that is called from many places.
#if defined(__CUDACC__)
#define HVDC_NOINLINE __noinline__
#else
#define HVDC_NOINLINE __attribute__((noinline))
#endif

// Before a loop of few rounds whose variables are to stand in registers.
#if defined(__CUDA_ARCH__)
#define HVDC_UNROLL _Pragma("unroll")
#elif defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__)
#define HVDC_UNROLL _Pragma("GCC unroll 16")
#else
#define HVDC_UNROLL
#endif

#ifndef HVDC_ARCH
#define HVDC_ARCH base
#endif

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "payloads are little-endian; byte swapping has not been written"
#endif

#endif  // HVDC_CODEC_MACROS_H_
