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

// The number of blocks of kThreads that the current device runs at a time.
template <class... Parameters>
int Resident(void (*kernel)(Parameters...), size_t shared, int64_t* most) {
  int device = 0, processors = 0, resident = 0;
  int status = Check(cudaGetDevice(&device));
  if (status == HVDC_OK) {
    status = Check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  }
  if (status == HVDC_OK) {
    status =
        Check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, kThreads, shared));
  }
  *most = static_cast<int64_t>(processors) * resident;
  return status;
}

template <class... Parameters, class... Arguments>
int LaunchBlocks(void (*kernel)(Parameters...), int64_t blocks, size_t shared, cudaStream_t stream,
                 const Arguments&... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  return Check(cudaLaunchKernelEx(&config, kernel, arguments...));
}

// Launches as many blocks as there is work for, at least one, but no more than the device runs at a
// time: they share the work that is left, and all end together.
template <class... Parameters, class... Arguments>
int Launch(void (*kernel)(Parameters...), int64_t blocks, size_t shared, cudaStream_t stream,
           const Arguments&... arguments) {
  int64_t most;
  const int status = Resident(kernel, shared, &most);
  if (status != HVDC_OK) return status;
  if (blocks > most) blocks = most;
  return LaunchBlocks(kernel, blocks < 1 ? 1 : blocks, shared, stream, arguments...);
}

// One job's work, if there is any.
template <class Job>
int Run(const Work<Single<Job>>& work, const Job& job, cudaStream_t stream) {
  if (!work.kernel) return HVDC_OK;
  return Launch(work.kernel, work.blocks, work.shared, stream, Single<Job>{job});
}

inline int Run(const Statistics<Single<EncodeJob>>& work, const EncodeJob& job,
               cudaStream_t stream) {
  int status = Run(work.sum, job, stream);
  if (status == HVDC_OK) status = Run(work.fold_chunks, job, stream);
  if (status == HVDC_OK) status = Run(work.fold_groups, job, stream);
  return status;
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
