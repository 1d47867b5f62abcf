#include "ledger.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "gpu_kernels.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/platform/errors.h"

namespace hvd_compress {

using tensorflow::mutex_lock;

void Ledger::Expect(int64_t graph, int64_t count) {
  mutex_lock lock(mutex_);
  counts_[graph] = count;
}

Standing Ledger::Begin(int64_t graph) {
  mutex_lock lock(mutex_);
  sent_.clear();
  expected_ = counts_[graph];
  arrived_ = 0;
  dropped_ = any_ready_ = false;
  if (gpu_) {
    gpu_->BeginStep();
    std::string met = gpu_->TakeError();
    if (!met.empty()) earlier_failure_ = {std::move(met), /*late=*/true};
  }
  if (!failure_.empty()) earlier_failure_ = {std::move(failure_), /*late=*/false};
  failure_.clear();
  counters_[kSteps] += 1;
  return Standing{agreed_, !earlier_failure_.message.empty()};
}

absl::StatusOr<std::shared_ptr<GpuKernels>> Ledger::OnGpu(tensorflow::OpKernelContext* context) {
  mutex_lock lock(mutex_);
  if (!gpu_) {
    auto kernels = GpuKernels::For(context);
    if (!kernels.ok()) return kernels.status();
    gpu_ = *std::move(kernels);
  }
  if (gpu_->Serve(context)) return gpu_;
  return tensorflow::errors::FailedPrecondition(
      "expected all gradients of a compressor on one GPU, got one on ", context->device()->name());
}

void Ledger::Ready(double uncompressed_bytes) {
  mutex_lock lock(mutex_);
  counters_[kUncompressedBytes] += uncompressed_bytes;
  last_ready_ = Clock::now();
  if (any_ready_) return;
  any_ready_ = true;
  first_ready_ = last_ready_;
  encoded_before_ = counters_[kEncodeSeconds];
}

void Ledger::Agree(bool agreed) {
  mutex_lock lock(mutex_);
  agreed_ = agreed;
}

void Ledger::Encoded(TakeBack take_back) {
  mutex_lock lock(mutex_);
  sent_.push_back(std::move(take_back));
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

absl::Status Ledger::Decoded(bool drop) {
  mutex_lock lock(mutex_);
  dropped_ = dropped_ || drop;
  return dropped_ ? TakeAllBack() : absl::OkStatus();
}

absl::Status Ledger::TakeAllBack() {
  while (!sent_.empty()) {
    TakeBack take_back = std::move(sent_.back());
    sent_.pop_back();
    TF_RETURN_IF_ERROR(take_back(When::kNow));
  }
  return absl::OkStatus();
}

void Ledger::Arrived() {
  std::map<int64_t, std::function<void()>> held;
  {
    mutex_lock lock(mutex_);
    if (++arrived_ != expected_) return;
    // What gradients without a codec released after the step was dropped; errors have been told.
    if (dropped_) TakeAllBack().IgnoreError();
    for (TakeBack& take_back : sent_) {
      const absl::Status status = take_back(When::kIfFlagged);
      if (!status.ok() && failure_.empty()) failure_ = std::string(status.message());
    }
    // The gradients' memory is not held longer than the step takes.
    sent_.clear();
    held.swap(held_);
  }
  for (auto& [number, end] : held) end();
}

void Ledger::ArrivedInVain(std::function<void()> end,
                           tensorflow::CancellationManager* cancellation) {
  Hold(std::move(end), cancellation);
  Arrived();
}

void Ledger::AtEnd(std::function<void()> end, tensorflow::CancellationManager* cancellation) {
  const int64_t number = Hold(std::move(end), cancellation);
  {
    mutex_lock lock(mutex_);
    if (arrived_ != expected_) return;
  }
  EndHeld(number);
}

int64_t Ledger::Hold(std::function<void()> end, tensorflow::CancellationManager* cancellation) {
  // A step is cancelled when one of its other operations fails: Horovod's, or the user's. The
  // manager may outlive the step.
  const auto token = cancellation ? cancellation->get_cancellation_token() : 0;
  int64_t number;
  {
    mutex_lock lock(mutex_);
    number = holds_++;
    held_.emplace(number, [end = std::move(end), cancellation, token] {
      if (cancellation) cancellation->TryDeregisterCallback(token);
      end();
    });
  }
  Ref();
  const std::shared_ptr<Ledger> self(this, [](Ledger* ledger) { ledger->Unref(); });
  const bool registered =
      cancellation != nullptr &&
      cancellation->RegisterCallback(token, [self, number] { self->EndHeld(number); });
  if (!registered) EndHeld(number);
  return number;
}

void Ledger::EndHeld(int64_t number) {
  std::function<void()> end;
  {
    mutex_lock lock(mutex_);
    const auto held = held_.find(number);
    if (held == held_.end()) return;
    end = std::move(held->second);
    held_.erase(held);
  }
  end();
}

bool Ledger::Over(bool everybody) {
  mutex_lock lock(mutex_);
  const auto now = Clock::now();
  if (everybody) {
    pace_.steps += 1;
    if (marked_) {
      const std::chrono::duration<double> seconds = now - mark_,
                                          window = last_ready_ - first_ready_;
      const double encoded = counters_[kEncodeSeconds] - encoded_before_;
      pace_.seconds.push_back(seconds.count());
      pace_.windows.push_back(any_ready_ ? std::max(0.0, window.count() - encoded) : 0.0);
    }
  }
  mark_ = now;
  marked_ = true;
  return everybody && wanted_at_ >= 0 && pace_.steps >= wanted_at_;
}

Pace Ledger::pace() {
  mutex_lock lock(mutex_);
  return pace_;
}

void Ledger::Schedule(int64_t steps, bool anew) {
  mutex_lock lock(mutex_);
  pace_ = {{}, {}, anew ? 0 : pace_.steps};
  marked_ = !anew;
  mark_ = Clock::now();
  wanted_at_ = steps < 0 ? -1 : pace_.steps + steps;
}

void Ledger::Count(Counter counter, double value) {
  mutex_lock lock(mutex_);
  counters_[counter] += value;
}

std::array<double, kCounters> Ledger::counters() {
  mutex_lock lock(mutex_);
  return counters_;
}

absl::Status LookupLedger(tensorflow::OpKernelContext* context, int input,
                          tensorflow::core::RefCountPtr<Ledger>* ledger) {
  const auto found = tensorflow::HandleFromInput(context, input).GetResource<Ledger>();
  if (!found.ok()) return found.status();
  (*found)->Ref();
  ledger->reset(*found);
  return absl::OkStatus();
}

}  // namespace hvd_compress
