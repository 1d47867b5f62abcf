// The gradients of one compressor in the current step: which are back, what takes the step back,
// and what has been counted.
#ifndef HVD_COMPRESS_TENSORFLOW_OPS_LEDGER_H_
#define HVD_COMPRESS_TENSORFLOW_OPS_LEDGER_H_

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels.h"
#include "latch.h"
#include "tensorflow/core/common_runtime/input_colocation_exemption_registry.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_base.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/lib/core/refcount.h"
#include "tensorflow/core/platform/mutex.h"

namespace hvd_compress {

class Bucket;
class GpuKernels;

// A step's change of a residual: a step writes the next residual into a buffer of its own, so that
// the one before is still there.
struct Move {
  tensorflow::core::RefCountPtr<tensorflow::Var> residual;
  tensorflow::Tensor before;

  std::shared_ptr<Kernels> kernels;  // that wrote it; null on the host

  void TakeBack() {
    tensorflow::mutex_lock lock(*residual->mu());
    *residual->tensor() = before;
  }

  // Undoes the move on the device, if only the device knows flags and a payload of the step has
  // one.
  absl::Status TakeBackIfFlagged() {
    if (!kernels) return absl::OkStatus();
    tensorflow::mutex_lock lock(*residual->mu());
    tensorflow::Tensor* const after = residual->tensor();
    return kernels->RestoreIfFlagged(before.data(), after->data(), DtypeOf(before.dtype()),
                                     before.NumElements());
  }
};

// Cumulative; the order is that of hvd_compress/tensorflow/compressor.py.
enum Counter {
  kSteps,
  kElements,
  kUncompressedBytes,
  kGatheredBytes,
  kDistributedBytes,
  kKeptBytes,
  kReducedBytes,
  kEncodeSeconds,
  kDecodeSeconds,
  kCounters
};

// This rank's part of the participation check.
struct Standing {
  bool agreed;  // whether its settings have been compared with theirs
  bool failed;  // whether one of its operations has failed in an earlier step
};

// The steps of one graph, as far as it has been traced.
struct Traced {
  int64_t gradients = 0;  // the number that come back, encoded or not
  std::vector<std::shared_ptr<const BucketLayout>> buckets;
};

// The error of an earlier step.
struct EarlierFailure {
  std::string message;  // empty: nothing
  bool late;            // whether the step itself has not raised an error, since no rank could know
};

// One non-finite gradient makes a whole step worthless, so that no residual may count it as sent.
// Which gradients those are is known only once they have been gathered, in any order; residuals
// that have moved on by then become those from before. On a GPU the host does not wait to see it:
// when all of the step's gradients are back, the device is told to undo what its flags say.
//
// An operation that fails ends TensorFlow's step, and what has not been sent by then never will be,
// though other ranks wait for it. So nothing fails before all of the step's gradients are back.
class Ledger : public tensorflow::ResourceBase {
 public:
  // threads: how many may work on one call of the CPU's kernels.
  explicit Ledger(int threads) : cpu_(MakeCpuKernels(threads)) {}

  // Notes how many gradients of a graph have been traced so far, and the layout of one of its
  // buckets.
  void Expect(int64_t graph, int64_t gradients);
  void Expect(int64_t graph, size_t bucket, std::shared_ptr<const BucketLayout> layout);

  // Starts an exchange of a graph. first: whether a step begins with it; otherwise it belongs to
  // the step before, which is dropped as a whole.
  Standing Begin(int64_t graph, bool first);

  // One of the step's buckets; null where there is none of that number.
  std::shared_ptr<Bucket> bucket(int64_t number);

  // The kernels of an operation's device. All operations on GPUs have to be on one GPU.
  absl::StatusOr<std::shared_ptr<Kernels>> KernelsOn(tensorflow::OpKernelContext* context);

  // Notes whether all ranks' settings are known to be the same.
  void Agree(bool agreed);

  // Notes that a residual has moved on.
  void Encoded(Move move);

  // Takes the last step back, if it has not been already: nobody uses its gradients. An error where
  // residuals have been replaced since.
  absl::Status DropStep();

  // Notes that other residuals come in the place of those of the last step.
  void Replace();

  // Notes that the last step's gradients have been used, so that nothing is left to take back.
  void Used();

  // Notes an error of this step. The first one counts: others may follow from it.
  void Fail(const std::string& message);

  // This step's error, if any.
  std::string failure();

  // An earlier step's error, if any; it is told once.
  EarlierFailure TakeEarlierFailure();

  // Notes that gradients have been decoded; with `drop`, every residual of the step becomes what
  // it was, also those that move on later.
  void Decoded(bool drop);

  // Notes that a gradient is back.
  void Returned();

  // Notes that a gradient is back and cannot be used; calls `end` as soon as all of the step's
  // gradients are back, or the step is cancelled.
  void ReturnedInVain(std::function<void()> end, tensorflow::CancellationManager* cancellation);

  void Count(Counter counter, double value);
  std::array<double, kCounters> counters();

  std::string DebugString() const override { return "hvd_compress ledger"; }

 private:
  void TakeBack();

  tensorflow::mutex mutex_;
  std::map<int64_t, Traced> traced_;  // by graph
  std::vector<std::shared_ptr<Bucket>> buckets_;
  std::vector<Move> moves_;                                 // of this step, or of the last one
  std::shared_ptr<Latch> end_ = std::make_shared<Latch>();  // all of the step's gradients are back
  int64_t expected_ = 0, returned_ = 0;
  bool dropped_ = false, replaced_ = false, agreed_ = false;
  std::string failure_;
  EarlierFailure earlier_failure_{};
  const std::shared_ptr<Kernels> cpu_;
  std::shared_ptr<GpuKernels> gpu_;  // from the first operation on one
  std::array<double, kCounters> counters_{};
};

// Registers an operation for both devices. TensorFlow would put it where its resources are: some of
// them are the host's. host: what is in the host's memory where the operation is on a GPU.
#define HVDC_REGISTER(name, Op, host)                              \
  REGISTER_KERNEL_BUILDER(Name(name).Device(DEVICE_CPU), Op);      \
  REGISTER_KERNEL_BUILDER(Name(name).Device(DEVICE_GPU) host, Op); \
  REGISTER_INPUT_COLOCATION_EXEMPTION(name)

// The resource that an operation's input refers to. TensorFlow's own look-up would refuse those of
// the host to operations on a GPU.
template <typename T>
absl::Status Lookup(tensorflow::OpKernelContext* context, int input,
                    tensorflow::core::RefCountPtr<T>* resource) {
  const tensorflow::ResourceHandle& handle = tensorflow::HandleFromInput(context, input);
  if (!handle.IsRefCounting()) return tensorflow::LookupResource(context, handle, resource);
  const auto found = handle.GetResource<T>();
  if (!found.ok()) return found.status();
  (*found)->Ref();
  resource->reset(*found);
  return absl::OkStatus();
}

}  // namespace hvd_compress

#endif  // HVD_COMPRESS_TENSORFLOW_OPS_LEDGER_H_
