#include "latch.h"

#include <utility>

namespace hvd_compress {

using tensorflow::mutex_lock;

void Latch::Set() {
  std::map<int64_t, Then> waiting;
  {
    mutex_lock lock(mutex_);
    set_ = true;
    waiting.swap(waiting_);
  }
  for (auto& [number, then] : waiting) then(true);
}

void Latch::Wait(Then then, tensorflow::CancellationManager* cancellation) {
  bool happened;
  {
    mutex_lock lock(mutex_);
    happened = set_;
    bool cancelled = false;
    const int64_t number = waits_++;
    if (!happened && cancellation != nullptr) {
      // The lock is held: the thread that calls `then` may end the step, and the manager with it.
      const auto token = cancellation->get_cancellation_token();
      cancelled = !cancellation->RegisterCallback(
          token, [self = shared_from_this(), number] { self->Cancel(number); });
      then = [cancellation, token, then = std::move(then)](bool happened) {
        cancellation->TryDeregisterCallback(token);
        then(happened);
      };
    }
    if (!happened && !cancelled) {
      waiting_.emplace(number, std::move(then));
      return;
    }
  }
  then(happened);
}

void Latch::Cancel(int64_t number) {
  Then then;
  {
    mutex_lock lock(mutex_);
    const auto waiting = waiting_.find(number);
    if (waiting == waiting_.end()) return;
    then = std::move(waiting->second);
    waiting_.erase(waiting);
  }
  then(false);
}

}  // namespace hvd_compress
