#include "ledger.h"

#include <memory>
#include <utility>

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
  dropped_ = false;
  if (!failure_.empty()) earlier_failure_ = std::move(failure_);
  failure_.clear();
  counters_[kSteps] += 1;
  return Standing{agreed_, !earlier_failure_.empty()};
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

std::string Ledger::TakeEarlierFailure() {
  mutex_lock lock(mutex_);
  return std::exchange(earlier_failure_, {});
}

absl::Status Ledger::Decoded(bool drop) {
  mutex_lock lock(mutex_);
  dropped_ = dropped_ || drop;
  if (!dropped_) return absl::OkStatus();
  while (!sent_.empty()) {
    TakeBack take_back = std::move(sent_.back());
    sent_.pop_back();
    TF_RETURN_IF_ERROR(take_back());
  }
  return absl::OkStatus();
}

void Ledger::Arrived() {
  std::map<int64_t, std::function<void()>> held;
  {
    mutex_lock lock(mutex_);
    if (++arrived_ != expected_) return;
    // The gradients' memory is not held longer than the step takes.
    sent_.clear();
    held.swap(held_);
  }
  for (auto& [number, end] : held) end();
}

void Ledger::ArrivedInVain(std::function<void()> end,
                           tensorflow::CancellationManager* cancellation) {
  int64_t number;
  {
    mutex_lock lock(mutex_);
    number = holds_++;
    held_.emplace(number, std::move(end));
  }
  // A step is cancelled when one of its other operations fails: Horovod's, or the user's. The
  // manager may outlive the step.
  Ref();
  const std::shared_ptr<Ledger> self(this, [](Ledger* ledger) { ledger->Unref(); });
  const bool registered = cancellation != nullptr &&
                          cancellation->RegisterCallback(cancellation->get_cancellation_token(),
                                                         [self, number] { self->EndHeld(number); });
  if (!registered) EndHeld(number);
  Arrived();
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

void Ledger::Count(Counter counter, double value) {
  mutex_lock lock(mutex_);
  counters_[counter] += value;
}

std::array<double, kCounters> Ledger::counters() {
  mutex_lock lock(mutex_);
  return counters_;
}

}  // namespace hvd_compress
