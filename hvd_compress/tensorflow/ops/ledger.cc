#include "ledger.h"

#include <utility>

#include "tensorflow/core/platform/errors.h"

namespace hvd_compress {

using tensorflow::mutex_lock;

void Ledger::Expect(int64_t graph, int64_t count) {
  mutex_lock lock(mutex_);
  counts_[graph] = count;
}

void Ledger::Begin(int64_t graph) {
  mutex_lock lock(mutex_);
  sent_.clear();
  expected_ = counts_[graph];
  decoded_ = 0;
  dropped_ = false;
  counters_[kSteps] += 1;
}

void Ledger::Encoded(int tensor, Sent sent) {
  mutex_lock lock(mutex_);
  sent_.insert_or_assign(tensor, std::move(sent));
}

absl::Status Ledger::Decoded(bool drop) {
  mutex_lock lock(mutex_);
  dropped_ = dropped_ || drop;
  if (dropped_) {
    for (auto& [tensor, sent] : sent_) {
      TF_RETURN_IF_ERROR(Undo(sent));
    }
  }
  // The gradients' memory is not held longer than the step takes.
  if (++decoded_ == expected_) sent_.clear();
  return absl::OkStatus();
}

void Ledger::Count(Counter counter, double value) {
  mutex_lock lock(mutex_);
  counters_[counter] += value;
}

std::array<double, kCounters> Ledger::counters() {
  mutex_lock lock(mutex_);
  return counters_;
}

absl::Status Ledger::Undo(Sent& sent) {
  if (sent.undone) return absl::OkStatus();
  mutex_lock lock(*sent.residual->mu());
  const hvdc_feedback feedback{sent.alpha, sent.beta,
                               sent.residual->tensor()->flat<float>().data()};
  const int status =
      hvdc_take_back(&sent.spec, sent.step, sent.gradient.data(), DtypeOf(sent.gradient.dtype()),
                     &feedback, sent.payload.data(), sent.payload.NumElements(), sent.threads);
  if (status != HVDC_OK) {
    return tensorflow::errors::Internal("taking a residual back failed with status ", status);
  }
  sent.undone = true;
  return absl::OkStatus();
}

int DtypeOf(tensorflow::DataType type) {
  switch (type) {
    case tensorflow::DT_HALF:
      return HVDC_DTYPE_FLOAT16;
    case tensorflow::DT_BFLOAT16:
      return HVDC_DTYPE_BFLOAT16;
    default:
      return HVDC_DTYPE_FLOAT32;
  }
}

}  // namespace hvd_compress
