// What an operation knows of its gradient's codec, and what the codec keeps from step to step.
#ifndef HVD_COMPRESS_TENSORFLOW_OPS_GRADIENT_CODEC_H_
#define HVD_COMPRESS_TENSORFLOW_OPS_GRADIENT_CODEC_H_

#include <cstdint>
#include <memory>
#include <string>

#include "hvdc.h"
#include "kernels.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"

namespace hvd_compress {

class Ledger;

// Attributes: label, spec (an hvdc_spec without rows and columns), tensor, threads, alpha, beta.
class GradientCodec {
 public:
  explicit GradientCodec(tensorflow::OpKernelConstruction* context);

  bool feedback() const { return alpha_ != 0; }
  const std::string& label() const { return label_; }

  // What works where the operation is; all of a compressor's operations on GPUs are on one of them.
  absl::StatusOr<std::shared_ptr<Kernels>> KernelsFor(tensorflow::OpKernelContext* context,
                                                      Ledger* ledger) const;

  // Whether a gradient has the elements that tracing counted on.
  absl::Status CheckTraced(int64_t count, const tensorflow::Tensor& gradient) const;

 protected:
  hvdc_spec SpecOf(const tensorflow::TensorShape& shape) const;
  hvdc_noise NoiseOf(int64_t seed, int64_t stream, int64_t step) const;
  hvdc_feedback FeedbackWith(float* residual) const { return {alpha_, beta_, residual}; }
  int threads() const { return threads_; }

  // The residual, one float32 an element that nobody else reads, zeros at first; null without
  // feedback. The caller holds the variable's lock.
  absl::Status Prepare(tensorflow::OpKernelContext* context, Kernels* kernels, int64_t count,
                       tensorflow::Var* residual, float** numbers) const;

 private:
  std::string label_;
  hvdc_spec spec_;
  int tensor_, threads_;
  float alpha_, beta_;
  std::shared_ptr<Kernels> cpu_;  // null on a GPU
};

// The C interface's name of a gradient's type.
int DtypeOf(tensorflow::DataType type);

}  // namespace hvd_compress

#endif  // HVD_COMPRESS_TENSORFLOW_OPS_GRADIENT_CODEC_H_
