#include "ledger.h"

#include <utility>

#include "bucket.h"
#include "gpu_kernels.h"
#include "tensorflow/core/platform/errors.h"

namespace hvd_compress {

using tensorflow::mutex_lock;

void Ledger::Expect(int64_t graph, int64_t gradients) {
  mutex_lock lock(mutex_);
  traced_[graph].gradients = gradients;
}

void Ledger::Expect(int64_t graph, size_t bucket, std::shared_ptr<const BucketLayout> layout) {
  mutex_lock lock(mutex_);
  auto& buckets = traced_[graph].buckets;
  if (buckets.size() <= bucket) buckets.resize(bucket + 1);
  buckets[bucket] = std::move(layout);
}

Standing Ledger::Begin(int64_t graph, bool first) {
  mutex_lock lock(mutex_);
  const Traced& traced = traced_[graph];
  buckets_.clear();
  for (const auto& layout : traced.buckets) buckets_.push_back(std::make_shared<Bucket>(layout));
  end_ = std::make_shared<Latch>();
  expected_ = traced.gradients;
  returned_ = 0;
  if (first) {
    moves_.clear();
    dropped_ = replaced_ = false;
    counters_[kSteps] += 1;
  }
  if (gpu_) {
    if (first) gpu_->BeginStep();
    std::string met = gpu_->TakeError();
    if (!met.empty()) earlier_failure_ = {std::move(met), /*late=*/true};
  }
  if (!failure_.empty()) earlier_failure_ = {std::move(failure_), /*late=*/false};
  failure_.clear();
  return Standing{agreed_, !earlier_failure_.message.empty()};
}

std::shared_ptr<Bucket> Ledger::bucket(int64_t number) {
  mutex_lock lock(mutex_);
  return number < static_cast<int64_t>(buckets_.size()) ? buckets_[number] : nullptr;
}

absl::StatusOr<std::shared_ptr<Kernels>> Ledger::KernelsOn(tensorflow::OpKernelContext* context) {
  if (context->device()->attributes().device_type() == tensorflow::DEVICE_CPU) return cpu_;
  mutex_lock lock(mutex_);
  if (!gpu_) {
    auto kernels = GpuKernels::For(context);
    if (!kernels.ok()) return kernels.status();
    gpu_ = *std::move(kernels);
  }
  if (gpu_->Serve(context)) return std::shared_ptr<Kernels>(gpu_);
  return tensorflow::errors::FailedPrecondition(
      "expected all gradients of a compressor on one GPU, got one on ", context->device()->name());
}

void Ledger::Agree(bool agreed) {
  mutex_lock lock(mutex_);
  agreed_ = agreed;
}

void Ledger::Encoded(Move move) {
  mutex_lock lock(mutex_);
  moves_.push_back(std::move(move));
}

absl::Status Ledger::DropStep() {
  mutex_lock lock(mutex_);
  if (replaced_) {
    return tensorflow::errors::FailedPrecondition(
        "drop_step: expected residuals as the last exchange left them, got others, restored from a "
        "checkpoint, or by load_resized() or reset(): call drop_step() before that");
  }
  TakeBack();
  return absl::OkStatus();
}

void Ledger::Replace() {
  mutex_lock lock(mutex_);
  replaced_ = replaced_ || !moves_.empty();
  moves_.clear();
}

void Ledger::Used() {
  mutex_lock lock(mutex_);
  moves_.clear();
}

void Ledger::Fail(const std::string& message) {
  mutex_lock lock(mutex_);
  if (failure_.empty()) failure_ = message;
}

std::string Ledger::failure() {
  mutex_lock lock(mutex_);
  return failure_;
}

EarlierFailure Ledger::TakeEarlierFailure() {
  mutex_lock lock(mutex_);
  return std::exchange(earlier_failure_, {});
}

void Ledger::Decoded(bool drop) {
  mutex_lock lock(mutex_);
  dropped_ = dropped_ || drop;
  if (dropped_) TakeBack();
}

void Ledger::TakeBack() {
  // The last one first: two exchanges of a step may have moved the same residual.
  for (; !moves_.empty(); moves_.pop_back()) moves_.back().TakeBack();
}

void Ledger::Returned() {
  std::shared_ptr<Latch> end;
  {
    mutex_lock lock(mutex_);
    if (++returned_ != expected_) return;
    for (auto move = moves_.rbegin(); move != moves_.rend(); ++move) {
      const absl::Status status = move->TakeBackIfFlagged();
      if (!status.ok() && failure_.empty()) failure_ = std::string(status.message());
    }
    buckets_.clear();
    end = end_;
  }
  end->Set();
}

void Ledger::ReturnedInVain(std::function<void()> end,
                            tensorflow::CancellationManager* cancellation) {
  std::shared_ptr<Latch> latch;
  {
    mutex_lock lock(mutex_);
    latch = end_;
  }
  latch->Wait([end = std::move(end)](bool) { end(); }, cancellation);
  Returned();
}

void Ledger::Count(Counter counter, double value) {
  mutex_lock lock(mutex_);
  counters_[counter] += value;
}

std::array<double, kCounters> Ledger::counters() {
  mutex_lock lock(mutex_);
  return counters_;
}

}  // namespace hvd_compress
