// The kernels for AVX-512.
#define HVDC_ARCH avx512

#include "cpu/make_kernels.h"
#include "simd/avx512.h"

namespace hvdc {

const Kernels kAvx512Kernels = HVDC_ARCH::MakeKernels<HVDC_ARCH::Avx512>("avx512");

}  // namespace hvdc
