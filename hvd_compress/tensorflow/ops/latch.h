// An event that asynchronous operations wait for, without a thread of their own.
#ifndef HVD_COMPRESS_TENSORFLOW_OPS_LATCH_H_
#define HVD_COMPRESS_TENSORFLOW_OPS_LATCH_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>

#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/platform/mutex.h"

namespace hvd_compress {

class Latch : public std::enable_shared_from_this<Latch> {
 public:
  using Then = std::function<void(bool happened)>;

  // The event has happened: calls all that wait.
  void Set();

  // Calls `then(true)` once the event has happened, or `then(false)` when the step is cancelled
  // before: one of its other operations has failed, Horovod's or the user's.
  void Wait(Then then, tensorflow::CancellationManager* cancellation);

 private:
  void Cancel(int64_t number);

  tensorflow::mutex mutex_;
  bool set_ = false;
  int64_t waits_ = 0;
  std::map<int64_t, Then> waiting_;
};

}  // namespace hvd_compress

#endif  // HVD_COMPRESS_TENSORFLOW_OPS_LATCH_H_
