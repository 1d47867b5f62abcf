// What a step has done to a residual.
#ifndef HVD_COMPRESS_TENSORFLOW_OPS_MOVE_H_
#define HVD_COMPRESS_TENSORFLOW_OPS_MOVE_H_

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/tensor.h"

namespace hvd_compress {

// A step writes the next residual into a buffer of its own, so that the one before is still there.
struct Move {
  tensorflow::core::RefCountPtr<tensorflow::Var> residual;
  tensorflow::Tensor before;

  // On a GPU: undoes the move there, if a payload of the step turns out to be flagged, which only
  // the device knows. It keeps the gradient's memory alive until the step is over.
  absl::AnyInvocable<absl::Status()> if_flagged;

  void TakeBack() {
    tensorflow::mutex_lock lock(*residual->mu());
    *residual->tensor() = before;
  }
};

}  // namespace hvd_compress

#endif  // HVD_COMPRESS_TENSORFLOW_OPS_MOVE_H_
