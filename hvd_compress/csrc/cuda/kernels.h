// The functions that .cu files call in each other: kernels for jobs, and work put into a stream.
// Those that return int return an hvdc_status or an hvdc_cuda_status.
#ifndef HVDC_CUDA_KERNELS_H_
#define HVDC_CUDA_KERNELS_H_

#include <cuda_runtime.h>

#include "cuda/jobs.h"

namespace hvdc {
namespace HVDC_ARCH {

// A kernel for a job, how many blocks of threads have work, and the shared memory of each in bytes.
// Jobs: the kernel's parameter, with this job or with many.
template <class Jobs>
struct Work {
  void (*kernel)(Jobs);
  int64_t blocks;
  size_t shared;
};

// Scales of groups that are not held: up to three kernels, one behind the other; null where there
// is none.
template <class Jobs>
struct Statistics {
  Work<Jobs> sum, fold_chunks, fold_groups;
};
template <class Jobs>
Statistics<Jobs> StatisticsWork(const EncodeJob& job);

// The payload, scales known or held.
template <class Jobs>
Work<Jobs> EncodeWork(const EncodeJob& job);
template <class Jobs>
Work<Jobs> DecodeWork(const DecodeJob& job);
// The same for top-k.
template <class Jobs>
Work<Jobs> TopKEncodeWork(const EncodeJob& job);
template <class Jobs>
Work<Jobs> TopKDecodeWork(const DecodeJob& job);

// Fills a workspace before the first call.
int Prepare(void* zeros, int64_t bytes, Int8Tables* tables, cudaStream_t stream);

// Remembers what CUDA answered, for hvdc_cuda_message.
int Check(cudaError_t error);

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CUDA_KERNELS_H_
