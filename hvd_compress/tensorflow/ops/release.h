// What other ways of sending a gradient have left unsent.
#ifndef HVD_COMPRESS_TENSORFLOW_OPS_RELEASE_H_
#define HVD_COMPRESS_TENSORFLOW_OPS_RELEASE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "ledger.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace hvd_compress {

// Attributes: label, begins, weights. The operation's last inputs are as many float32 variables, of
// elements of the gradient from begins[i] on.
class Release {
 public:
  explicit Release(tensorflow::OpKernelConstruction* context);

  // Adds the variables' numbers, multiplied by their weights, to the gradient, and empties them.
  // Most often they are empty, and `released` is the gradient itself. A variable that does not fit
  // stays as it is, and the step fails when its gradients are back.
  template <typename T>
  absl::Status Add(tensorflow::OpKernelContext* context, const tensorflow::Tensor& gradient,
                   Ledger* ledger, tensorflow::Tensor* released) const;

 private:
  std::string label_;
  std::vector<int64_t> begins_;
  std::vector<float> weights_;
};

}  // namespace hvd_compress

#endif  // HVD_COMPRESS_TENSORFLOW_OPS_RELEASE_H_
