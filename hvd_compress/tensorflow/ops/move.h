// A step's change of a residual.
#ifndef HVD_COMPRESS_TENSORFLOW_OPS_MOVE_H_
#define HVD_COMPRESS_TENSORFLOW_OPS_MOVE_H_

#include <memory>

#include "absl/status/status.h"
#include "kernels.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/tensor.h"

namespace hvd_compress {

// A step writes the next residual into a buffer of its own, so that the one before is still there.
struct Move {
  tensorflow::core::RefCountPtr<tensorflow::Var> residual;
  tensorflow::Tensor before;

  std::shared_ptr<Kernels> kernels;  // that wrote it; null on the host

  void TakeBack() {
    tensorflow::mutex_lock lock(*residual->mu());
    *residual->tensor() = before;
  }

  // Where only the device knows flags: undoes the move there, if a payload of the step is flagged.
  absl::Status TakeBackIfFlagged() {
    if (!kernels) return absl::OkStatus();
    tensorflow::mutex_lock lock(*residual->mu());
    tensorflow::Tensor* const after = residual->tensor();
    return kernels->RestoreIfFlagged(before.data(), after->data(), DtypeOf(before.dtype()),
                                     before.NumElements());
  }
};

}  // namespace hvd_compress

#endif  // HVD_COMPRESS_TENSORFLOW_OPS_MOVE_H_
