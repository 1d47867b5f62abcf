// Kernel launches: how many blocks, and which coder.
#ifndef HVDC_CUDA_LAUNCH_H_
#define HVDC_CUDA_LAUNCH_H_

#include <type_traits>

#include "codec/stats.h"
#include "cuda/grid.h"
#include "cuda/kernels.h"
#include "simd/thread.h"

namespace hvdc {
namespace HVDC_ARCH {

// Blocks whose threads have one quad each.
inline int64_t BlocksForQuads(int64_t count) { return (count + 4 * kThreads - 1) / (4 * kThreads); }

template <class Parameter>
int Launch(void (*kernel)(Parameter), int64_t blocks, size_t shared, cudaStream_t stream,
           const Parameter& parameter) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  return Check(cudaLaunchKernelEx(&config, kernel, parameter));
}

// Calls call with the dtype of a job's residuals; float32 where there are none.
template <class Call>
auto WithResidual(const EncodeJob& job, const Call& call) {
  if (job.mode != Mode::kNone && job.residual_dtype == HVDC_DTYPE_BFLOAT16) {
    return call(std::integral_constant<int, HVDC_DTYPE_BFLOAT16>());
  }
  return call(std::integral_constant<int, HVDC_DTYPE_FLOAT32>());
}

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CUDA_LAUNCH_H_
