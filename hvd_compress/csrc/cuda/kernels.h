// What the .cu files offer to each other: work put into a stream. Functions return an hvdc_status
// or an hvdc_cuda_status.
#ifndef HVDC_CUDA_KERNELS_H_
#define HVDC_CUDA_KERNELS_H_

#include <cuda_runtime.h>

#include "cuda/jobs.h"

namespace hvdc {
namespace HVDC_ARCH {

// Scales of groups that are not held; nothing where there are none.
int Statistics(const EncodeJob& job, cudaStream_t stream);
// The payload, scales known or held.
int Encode(const EncodeJob& job, cudaStream_t stream);
int DecodeSum(const DecodeJob& job, cudaStream_t stream);
// Copies if *when is not 0.
int Restore(const float* before, float* after, uint32_t count, const uint32_t* when,
            cudaStream_t stream);
// The sum of squares of job.gradient's float32 numbers.
int SquareSum(const EncodeJob& job, double* result, cudaStream_t stream);
int CollectFlags(const uint8_t* payloads, int64_t stride, int32_t count, uint32_t* flags,
                 cudaStream_t stream);
// Fills a workspace.
int Prepare(const Workspace& workspace, cudaStream_t stream);

// Remembers what CUDA answered, for hvdc_cuda_message.
int Check(cudaError_t error);

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CUDA_KERNELS_H_
