// float16 by the compiler's own type, so that the kernels' conversions are checked against another
// implementation than codec/half.h.
#ifndef HVDC_TESTS_EMULATED_CUDA_FP16_H_
#define HVDC_TESTS_EMULATED_CUDA_FP16_H_

#include "cuda_runtime.h"

struct __half {
  _Float16 value;
};
inline __half __float2half_rn(float x) { return {static_cast<_Float16>(x)}; }
inline float __half2float(__half x) { return static_cast<float>(x.value); }
inline unsigned short __half_as_ushort(__half x) {
  return emulated::FromBits<unsigned short>(emulated::ToBits(x.value));
}
inline __half __ushort_as_half(unsigned short x) {
  return {emulated::FromBits<_Float16>(emulated::ToBits(x))};
}

#endif  // HVDC_TESTS_EMULATED_CUDA_FP16_H_
