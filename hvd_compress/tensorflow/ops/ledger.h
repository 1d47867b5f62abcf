// What one compressor has encoded in the current step, so that the step can be undone, and what it
// has counted.
#ifndef HVD_COMPRESS_TENSORFLOW_OPS_LEDGER_H_
#define HVD_COMPRESS_TENSORFLOW_OPS_LEDGER_H_

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/resource_base.h"
#include "tensorflow/core/lib/core/refcount.h"
#include "tensorflow/core/platform/mutex.h"

namespace tensorflow {
class OpKernelContext;
}

namespace hvd_compress {

class GpuKernels;

// Takes the residual of encoded numbers back to what it was. It keeps the gradient's memory alive
// until the step is over.
using TakeBack = absl::AnyInvocable<absl::Status(When)>;

// Cumulative; the order is that of hvd_compress/tensorflow/compressor.py.
enum Counter {
  kSteps,
  kTensors,
  kElements,
  kUncompressedBytes,
  kGatheredBytes,
  kDistributedBytes,
  kKeptBytes,
  kHostGatheredBytes,
  kHostDistributedBytes,
  kHostKeptBytes,
  kDenseBytes,
  kEncodeSeconds,
  kDecodeSeconds,
  kCounters
};

// What the roll call tells the other ranks about this one.
struct Standing {
  bool agreed;  // whether its settings have been compared with theirs
  bool failed;  // whether one of its operations has failed in an earlier step
};

// How long the steps took since the planner was scheduled, in seconds, and how long messages could
// travel in each of them while gradients were still being computed.
struct Pace {
  std::vector<double> seconds, windows;
  int64_t steps;  // in which all ranks took part, since the count began
};

// What failed in an earlier step.
struct EarlierFailure {
  std::string message;  // empty: nothing
  bool late;            // whether the step itself has not raised an error, since nobody could know
};

// One non-finite gradient makes a whole step worthless, so that no residual may count it as sent.
// Which gradients those are is known only once they have been gathered, in any order; residuals
// that have moved on by then are taken back. On a GPU the host does not wait to see it: when all of
// the step's gradients are back, the device is told to take back what its flags say.
//
// An operation that fails ends TensorFlow's step, and what has not been sent by then never will be,
// though other ranks wait for it. So nothing fails before all of the step's gradients are back.
class Ledger : public tensorflow::ResourceBase {
 public:
  // Says how many gradients come back in a step of a graph, encoded or not.
  void Expect(int64_t graph, int64_t count);

  // Starts a step of a graph.
  Standing Begin(int64_t graph);

  // Notes that a gradient of so many bytes has been computed.
  void Ready(double uncompressed_bytes);
  // The kernels of the GPU that an operation is on, which has to be the one of all others.
  absl::StatusOr<std::shared_ptr<GpuKernels>> OnGpu(tensorflow::OpKernelContext* context);

  // Notes whether all ranks' settings are known to be the same.
  void Agree(bool agreed);

  // Notes that a residual has been updated.
  void Encoded(TakeBack take_back);

  // Notes an error of this step. The first one counts: others may follow from it.
  void Fail(const std::string& message);

  // This step's error, if any.
  std::string failure();

  // An earlier step's error, if any; it is told once.
  EarlierFailure TakeEarlierFailure();

  // Notes that a gradient has been decoded; with `drop`, every residual of the step is or will be
  // taken back.
  absl::Status Decoded(bool drop);

  // Notes that a gradient is back.
  void Arrived();

  // Notes that a gradient is back and cannot be used; `end` ends its operation, as by AtEnd.
  void ArrivedInVain(std::function<void()> end, tensorflow::CancellationManager* cancellation);

  // Calls `end` as soon as all of the step's gradients are back, or the step is cancelled.
  void AtEnd(std::function<void()> end, tensorflow::CancellationManager* cancellation);

  // Takes the time of a step that is over. One in which not all ranks took part does not count.
  // Returns whether the planner is wanted at its end.
  bool Over(bool everybody);

  Pace pace();

  // Wants the planner at the end of the so many-th step from now, or never if negative. Times are
  // taken from now on; with `anew`, from the end of the next step on, and the count begins with it.
  void Schedule(int64_t steps, bool anew);

  void Count(Counter counter, double value);
  std::array<double, kCounters> counters();

  std::string DebugString() const override { return "hvd_compress ledger"; }

 private:
  using Clock = std::chrono::steady_clock;

  absl::Status TakeAllBack();
  void EndHeld(int64_t number);
  int64_t Hold(std::function<void()> end, tensorflow::CancellationManager* cancellation);

  tensorflow::mutex mutex_;
  std::map<int64_t, int64_t> counts_;  // by graph
  std::vector<TakeBack> sent_;
  std::map<int64_t, std::function<void()>> held_;  // operations that wait for the end, by number
  int64_t expected_ = 0, arrived_ = 0, holds_ = 0;
  bool dropped_ = false, agreed_ = false;
  std::string failure_;
  EarlierFailure earlier_failure_{};
  std::shared_ptr<GpuKernels> gpu_;  // from the first operation on one
  std::array<double, kCounters> counters_{};
  Clock::time_point first_ready_, last_ready_, mark_;
  double encoded_before_ = 0;
  bool any_ready_ = false, marked_ = false;
  Pace pace_{{}, {}, 0};
  int64_t wanted_at_ = -1;
};

// The ledger that an operation's input refers to. It is the host's, and operations on a GPU use it,
// too: TensorFlow's own look-up would refuse it there.
absl::Status LookupLedger(tensorflow::OpKernelContext* context, int input,
                          tensorflow::core::RefCountPtr<Ledger>* ledger);

}  // namespace hvd_compress

#endif  // HVD_COMPRESS_TENSORFLOW_OPS_LEDGER_H_
