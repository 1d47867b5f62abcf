// What the encoding and the decoding operation have in common.
#ifndef HVD_COMPRESS_TENSORFLOW_OPS_CODEC_OP_H_
#define HVD_COMPRESS_TENSORFLOW_OPS_CODEC_OP_H_

#include <cstring>
#include <string>

#include "hvdc.h"
#include "ledger.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace hvd_compress {

// Attributes: label, spec (an hvdc_spec without rows and columns), tensor, threads, alpha, beta.
template <typename Kernel>
class CodecOp : public Kernel {
 public:
  explicit CodecOp(tensorflow::OpKernelConstruction* context) : Kernel(context) {
    std::string spec;
    OP_REQUIRES_OK(context, context->GetAttr("label", &label_));
    OP_REQUIRES_OK(context, context->GetAttr("spec", &spec));
    OP_REQUIRES_OK(context, context->GetAttr("tensor", &tensor_));
    OP_REQUIRES_OK(context, context->GetAttr("threads", &threads_));
    OP_REQUIRES_OK(context, context->GetAttr("alpha", &alpha_));
    OP_REQUIRES_OK(context, context->GetAttr("beta", &beta_));
    OP_REQUIRES(context, spec.size() == sizeof(spec_),
                tensorflow::errors::InvalidArgument(label_, ": expected a spec of ", sizeof(spec_),
                                                    " bytes, got ", spec.size()));
    std::memcpy(&spec_, spec.data(), sizeof(spec_));
  }

 protected:
  // The spec for a tensor of that shape: a matrix of its first dimension and the rest.
  hvdc_spec SpecFor(const tensorflow::TensorShape& shape) const {
    hvdc_spec spec = spec_;
    spec.rows = shape.dims() ? shape.dim_size(0) : 1;
    spec.columns = 1;
    for (int i = 1; i < shape.dims(); ++i) spec.columns *= shape.dim_size(i);
    return spec;
  }

  bool feedback() const { return alpha_ != 0; }

  std::string label_;
  int tensor_, threads_;
  float alpha_, beta_;

 private:
  hvdc_spec spec_;
};

template <typename T>
absl::Status Lookup(tensorflow::OpKernelContext* context, int input,
                    tensorflow::core::RefCountPtr<T>* resource) {
  return tensorflow::LookupResource(context, tensorflow::HandleFromInput(context, input), resource);
}

}  // namespace hvd_compress

#endif  // HVD_COMPRESS_TENSORFLOW_OPS_CODEC_OP_H_
