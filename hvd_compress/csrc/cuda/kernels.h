// The functions that .cu files call in each other: kernels for jobs, and work put into a stream.
// Those that return int return an hvdc_status or an hvdc_cuda_status.
#ifndef HVDC_CUDA_KERNELS_H_
#define HVDC_CUDA_KERNELS_H_

#include <cuda_runtime.h>

#include "cuda/batch.h"

namespace hvdc {
namespace HVDC_ARCH {

// A kernel for a job of a batch, how many blocks of threads have work, and the shared memory of
// each in bytes.
template <class Batch>
struct Work {
  void (*kernel)(Batch);
  int64_t blocks;
  size_t shared;
};

// Scales of groups that are not held: up to three kernels, one behind the other; null where there
// is none.
struct Statistics {
  Work<EncodeBatch> sum, fold_chunks, fold_groups;
};
Statistics StatisticsWork(const EncodeJob& job);

// The payload, scales known or held.
Work<EncodeBatch> EncodeWork(const EncodeJob& job);
Work<DecodeBatch> DecodeWork(const DecodeJob& job);
// The same for top-k.
Work<EncodeBatch> TopKEncodeWork(const EncodeJob& job);
Work<DecodeBatch> TopKDecodeWork(const DecodeJob& job);

// Remembers what CUDA answered, for hvdc_cuda_message.
int Check(cudaError_t error);

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CUDA_KERNELS_H_
