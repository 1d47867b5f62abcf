// The kernels for AVX2.
#define HVDC_ARCH avx2

#include "cpu/make_kernels.h"
#include "simd/avx2.h"

namespace hvdc {

const Kernels kAvx2Kernels = HVDC_ARCH::MakeKernels<HVDC_ARCH::Avx2>("avx2");

}  // namespace hvdc
