// Decodes and adds all ranks' payloads, or the averages of parts, or takes the sum that went
// uncompressed.
#include <vector>

#include "coder.h"
#include "result_op.h"
#include "tensorflow/core/common_runtime/input_colocation_exemption_registry.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace hvd_compress {
namespace {

using namespace tensorflow;  // NOLINT: the registration macros need it

// message: the ranks' payloads one after the other. begins, lengths: the pieces of which owners
// sent their averages; none where ranks sent payloads of the whole gradient. ranks: how many sent
// one of each piece, those of one piece following each other. scale: on their sum. The rest is a
// ResultOp's.
REGISTER_OP("HvdcDecode")
    .Input("message: uint8")
    .Input("gathered: bool")
    .Input("reduced: float")
    .Input("gradient: T")
    .Input("ledger: resource")
    .Input("step: int64")
    .Output("sum: T")
    .Attr("T: {float, half, bfloat16}")
    .Attr("label: string")
    .Attr("spec: string")
    .Attr("tensor: int")
    .Attr("threads: int")
    .Attr("alpha: float")
    .Attr("beta: float")
    .Attr("ranks: int")
    .Attr("begins: list(int)")
    .Attr("lengths: list(int)")
    .Attr("scale: float")
    .Attr("sum_scale: float")
    .SetIsStateful()
    .SetShapeFn([](shape_inference::InferenceContext* c) {
      c->set_output(0, c->input(3));
      return absl::OkStatus();
    });

class DecodeOp : public ResultOp {
 public:
  explicit DecodeOp(OpKernelConstruction* context) : ResultOp(context), coder_(context) {
    OP_REQUIRES_OK(context, context->GetAttr("ranks", &ranks_));
    OP_REQUIRES_OK(context, context->GetAttr("begins", &begins_));
    OP_REQUIRES_OK(context, context->GetAttr("lengths", &lengths_));
    OP_REQUIRES_OK(context, context->GetAttr("scale", &scale_));
  }

 private:
  const GradientCodec& codec() const override { return coder_; }

  absl::Status Decode(OpKernelContext* context, Kernels* kernels, const Tensor& message,
                      Tensor* sum, bool* nonfinite) const override {
    const int64_t step = context->input(5).scalar<int64_t>()();
    if (lengths_.empty()) {
      return coder_.Decode(kernels, {coder_.Whole(sum->shape())}, Source::kRanks, ranks_, scale_,
                           step, message, sum, nonfinite);
    }
    return coder_.Decode(kernels, coder_.Parts(begins_, lengths_), Source::kOwners, ranks_, scale_,
                         step, message, sum, nonfinite);
  }

  Coder coder_;
  std::vector<int64_t> begins_, lengths_;
  int ranks_;
  float scale_;
};
REGISTER_KERNEL_BUILDER(Name("HvdcDecode").Device(DEVICE_CPU), DecodeOp);
// The token is only waited for, so it may be where Horovod left it.
REGISTER_KERNEL_BUILDER(Name("HvdcDecode")
                            .Device(DEVICE_GPU)
                            .HostMemory("gathered")
                            .HostMemory("ledger")
                            .HostMemory("step"),
                        DecodeOp);
REGISTER_INPUT_COLOCATION_EXEMPTION("HvdcDecode");

}  // namespace
}  // namespace hvd_compress
