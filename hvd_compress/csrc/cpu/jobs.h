// Jobs from the arguments of the C interface.
#ifndef HVDC_CPU_JOBS_H_
#define HVDC_CPU_JOBS_H_

#include "codec/layout.h"
#include "cpu/kernels.h"

namespace hvdc {

inline bool ValidDtype(int dtype) {
  return dtype >= HVDC_DTYPE_FLOAT32 && dtype <= HVDC_DTYPE_BFLOAT16;
}

// What is encoded, and how its residual takes part; neither noise nor where it goes. Of a valid
// spec.
inline EncodeJob MakeEncodeJob(const hvdc_spec* spec, const void* gradient, int dtype,
                               const hvdc_feedback* feedback) {
  EncodeJob job = {};
  job.spec = spec;
  job.layout = base::MakeLayout(*spec);
  job.gradient = gradient;
  job.dtype = dtype;
  job.mode = Mode::kNone;
  if (feedback) {
    job.mode = feedback->alpha == feedback->beta ? Mode::kShared : Mode::kGeneral;
    job.residual = feedback->residual;
    job.alpha = feedback->alpha;
    job.beta = feedback->beta;
  }
  job.group.finite = job.group.kept = true;
  return job;
}

}  // namespace hvdc

#endif  // HVDC_CPU_JOBS_H_
