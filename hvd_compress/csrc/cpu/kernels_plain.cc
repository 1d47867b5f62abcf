// The kernels for any machine.
#define HVDC_ARCH plain

#include "cpu/make_kernels.h"
#include "simd/plain.h"

namespace hvdc {

const Kernels kPlainKernels = HVDC_ARCH::MakeKernels<HVDC_ARCH::Plain>("plain");

}  // namespace hvdc
