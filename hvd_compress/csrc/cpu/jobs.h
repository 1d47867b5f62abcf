// Jobs from the arguments of the C interface.
#ifndef HVDC_CPU_JOBS_H_
#define HVDC_CPU_JOBS_H_

#include <stddef.h>

#include "codec/layout.h"
#include "codec/philox.h"
#include "cpu/kernels.h"

namespace hvdc {

static_assert(sizeof(void*) == 8, "hvdc_tensor is laid out for pointers of eight bytes");
static_assert(sizeof(hvdc_tensor) == 136 && offsetof(hvdc_tensor, values) == 72 &&
                  offsetof(hvdc_tensor, offset) == 104 && offsetof(hvdc_tensor, dtype) == 120,
              "hvdc_tensor has no padding");

inline bool ValidDtype(int dtype) {
  return dtype >= HVDC_DTYPE_FLOAT32 && dtype <= HVDC_DTYPE_BFLOAT16;
}

// Whether a tensor meets the demands of every call.
inline bool ValidTensor(const hvdc_tensor& tensor) {
  if (!base::ValidSpec(tensor.spec) || !ValidDtype(tensor.dtype)) return false;
  const bool empty = !tensor.spec.rows || !tensor.spec.columns;
  const int dtype = tensor.residual_dtype;
  const bool keeps = dtype == HVDC_DTYPE_FLOAT32 || dtype == HVDC_DTYPE_BFLOAT16;
  return empty || (tensor.values && keeps && !tensor.residual == !tensor.next_residual);
}

// Whether a tensor has its place in a message, where it takes that many bytes.
inline bool ValidPlace(const hvdc_tensor& tensor, int64_t bytes) {
  return tensor.payload_bytes == bytes && tensor.offset >= 0 && tensor.offset % 4 == 0;
}

inline bool ValidMessage(const void* message) {
  return message && reinterpret_cast<uintptr_t>(message) % 4 == 0;
}

// The tables of a spec's coder, made when first asked for; null where it has none.
const Int8Tables* TablesOf(const hvdc_spec& spec);

// The job that encodes a valid tensor, without its place in a message.
inline EncodeJob MakeEncodeJob(const hvdc_tensor& tensor) {
  EncodeJob job = {};
  job.spec = &tensor.spec;
  job.tables = TablesOf(tensor.spec);
  job.layout = base::MakeLayout(tensor.spec);
  job.noise = base::MakeNoise(tensor.noise);
  job.step = static_cast<uint32_t>(tensor.noise.step);
  job.gradient = tensor.values;
  job.dtype = tensor.dtype;
  job.mode = Mode::kNone;
  if (tensor.next_residual) {
    job.mode = tensor.alpha == tensor.beta ? Mode::kShared : Mode::kGeneral;
    job.residual = static_cast<const char*>(tensor.residual);
    job.next_residual = static_cast<char*>(tensor.next_residual);
    job.residual_width = tensor.residual_dtype == HVDC_DTYPE_FLOAT32 ? 4 : 2;
    job.alpha = tensor.alpha;
    job.beta = tensor.beta;
  }
  job.group.finite = job.group.kept = true;
  return job;
}

// The job that decodes to a valid tensor, without payloads.
inline DecodeJob MakeDecodeJob(const hvdc_tensor& tensor, float scale) {
  DecodeJob job = {};
  job.spec = &tensor.spec;
  job.tables = TablesOf(tensor.spec);
  job.layout = base::MakeLayout(tensor.spec);
  job.step = static_cast<uint32_t>(tensor.noise.step);
  job.scale = scale;
  job.out = tensor.values;
  job.dtype = tensor.dtype;
  return job;
}

// Marks residuals to be written past the caches if they are too many to be found there in the next
// step, and are not updated in place: a usual store first reads the line that it overwrites.
inline void StreamResiduals(EncodeJob* jobs, int64_t count) {
  constexpr int64_t kLeast = int64_t{1} << 19;  // elements, by measurement
  int64_t elements = 0;
  for (int64_t i = 0; i < count; ++i) elements += jobs[i].layout.count;
  if (elements < kLeast) return;
  for (int64_t i = 0; i < count; ++i) {
    const bool aligned = reinterpret_cast<uintptr_t>(jobs[i].next_residual) % 64 == 0;
    jobs[i].stream = aligned && jobs[i].next_residual != jobs[i].residual;
  }
}

}  // namespace hvdc

#endif  // HVDC_CPU_JOBS_H_
