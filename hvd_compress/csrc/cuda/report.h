// What is told of payloads that are wrong.
#ifndef HVDC_CUDA_REPORT_H_
#define HVDC_CUDA_REPORT_H_

#include "cuda/grid.h"

namespace hvdc {
namespace HVDC_ARCH {

// Plain writes, since atomic ones need not work on host memory; the status last, for a host that
// looks at any time.
__device__ inline void Report(const DecodeJob& job, uint32_t status, int32_t payload) {
  volatile hvdc_cuda_error* const error = job.error;
  if (!error || error->status != HVDC_OK) return;
  error->payload = payload;
  error->tag = job.tag;
  __threadfence_system();
  error->status = status;
}

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CUDA_REPORT_H_
