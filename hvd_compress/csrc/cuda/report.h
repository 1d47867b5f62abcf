// What is told of payloads that are wrong.
#ifndef HVDC_CUDA_REPORT_H_
#define HVDC_CUDA_REPORT_H_

#include "cuda/grid.h"

namespace hvdc {
namespace HVDC_ARCH {

// Called by one thread of every job of a call. found: eight times the index of the first payload
// that is wrong, plus its status; all bits set where there is none. The last one to come writes
// what the job of the lowest number has found, whatever the order: so there is one writer, and what
// it writes does not depend on the device.
__device__ inline void Report(const DecodeJob& job, uint32_t found) {
  constexpr unsigned long long kNothing = ~0ull;
  Verdict* const verdict = job.workspace.verdict;
  if (found != ~0u) {
    atomicMax(&verdict->worst, ~(static_cast<unsigned long long>(job.number) << 32 | found));
  }
  __threadfence();
  if (atomicAdd(&verdict->done, 1u) != job.jobs - 1) return;
  __threadfence();
  const unsigned long long first = ~atomicExch(&verdict->worst, 0ull);
  atomicExch(&verdict->done, 0u);
  volatile hvdc_cuda_error* const error = job.error;
  if (first == kNothing || !error || error->status != HVDC_OK) return;
  // Plain writes, since atomic ones need not work on host memory; the status last, for a host that
  // looks at any time.
  error->payload = static_cast<int32_t>(static_cast<uint32_t>(first) / 8);
  error->tag = job.tag + (first >> 32);
  __threadfence_system();
  error->status = static_cast<uint32_t>(first) % 8;
}

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CUDA_REPORT_H_
