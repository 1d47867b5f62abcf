// What every operation does that makes a gradient's result.
#ifndef HVD_COMPRESS_TENSORFLOW_OPS_RESULT_OP_H_
#define HVD_COMPRESS_TENSORFLOW_OPS_RESULT_OP_H_

#include <memory>

#include "gradient_codec.h"
#include "ledger.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace hvd_compress {

// Inputs: message (what came back or, where `gathered` is false, the float32 sum of the ranks'
// gradients), gathered, reduced (the token, which tells that Horovod has finished, too), gradient,
// ledger, and whatever a subclass needs. Attributes: sum_scale (on the uncompressed sum).
//
// Asynchronous because of its errors, which wait for the step's other gradients.
class ResultOp : public tensorflow::AsyncOpKernel {
 public:
  explicit ResultOp(tensorflow::OpKernelConstruction* context);

  void ComputeAsync(tensorflow::OpKernelContext* context, DoneCallback done) override;

 private:
  virtual const GradientCodec& codec() const = 0;

  // Makes `sum` of what came back; sets `nonfinite` where a rank is known to have sent an Inf or a
  // NaN.
  virtual absl::Status Decode(tensorflow::OpKernelContext* context, Kernels* kernels,
                              const tensorflow::Tensor& message, tensorflow::Tensor* sum,
                              bool* nonfinite) const = 0;

  absl::Status Result(tensorflow::OpKernelContext* context, Ledger* ledger) const;
  absl::Status Scale(Kernels* kernels, const tensorflow::Tensor& message,
                     tensorflow::Tensor* sum) const;

  float sum_scale_;
};

}  // namespace hvd_compress

#endif  // HVD_COMPRESS_TENSORFLOW_OPS_RESULT_OP_H_
