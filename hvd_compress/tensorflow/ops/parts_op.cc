// Cuts a gradient into parts for their owners, which get them as they are.
#include <cstring>
#include <vector>

#include "gradient_codec.h"
#include "ledger.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/types.h"

namespace hvd_compress {
namespace {

using namespace tensorflow;  // NOLINT: the registration macros need it

// begins, lengths: of each owner's part. own: elements that this rank will encode. step: as of
// HvdcEncode. It does not fail, because the owners wait for parts: they get none, which they
// notice. The message is then empty, as it is while the gradient warms up.
REGISTER_OP("HvdcParts")
    .Input("gradient: T")
    .Input("step: int64")
    .Input("ledger: resource")
    .Output("message: uint8")
    .Attr("T: {float, half, bfloat16}")
    .Attr("label: string")
    .Attr("spec: string")
    .Attr("tensor: int")
    .Attr("threads: int")
    .Attr("alpha: float")
    .Attr("beta: float")
    .Attr("begins: list(int)")
    .Attr("lengths: list(int)")
    .Attr("own: int")
    .SetIsStateful()
    .SetShapeFn([](shape_inference::InferenceContext* c) {
      c->set_output(0, c->Vector(shape_inference::InferenceContext::kUnknownDim));
      return absl::OkStatus();
    });

class PartsOp : public OpKernel {
 public:
  explicit PartsOp(OpKernelConstruction* context) : OpKernel(context), codec_(context) {
    OP_REQUIRES_OK(context, context->GetAttr("begins", &begins_));
    OP_REQUIRES_OK(context, context->GetAttr("lengths", &lengths_));
    OP_REQUIRES_OK(context, context->GetAttr("own", &own_));
  }

  void Compute(OpKernelContext* context) override {
    core::RefCountPtr<Ledger> ledger;
    OP_REQUIRES_OK(context, LookupLedger(context, 2, &ledger));
    const Tensor& gradient = context->input(0);
    const int64_t step = context->input(1).scalar<int64_t>()();
    Tensor* message;
    ledger->Ready(static_cast<double>(gradient.TotalBytes()));
    int64_t count = 0;
    for (const int64_t length : lengths_) count += length;
    const absl::Status status = codec_.CheckTraced(count, gradient);
    if (step >= 0 && !status.ok()) ledger->Fail(std::string(status.message()));
    const bool empty = step < 0 || !status.ok();
    const int64_t bytes = empty ? 0 : static_cast<int64_t>(gradient.TotalBytes());
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({bytes}), &message));
    if (empty) return;
    ledger->Count(kTensors, 1);
    ledger->Count(kElements, static_cast<double>(own_));
    const int64_t width = DataTypeSize(gradient.dtype());
    const auto* from = static_cast<const uint8_t*>(gradient.data());
    uint8_t* to = message->flat<uint8_t>().data();
    for (size_t i = 0; i < lengths_.size(); ++i) {
      std::memcpy(to, from + begins_[i] * width, lengths_[i] * width);
      to += lengths_[i] * width;
    }
  }

 private:
  GradientCodec codec_;
  std::vector<int64_t> begins_, lengths_;
  int64_t own_;
};
REGISTER_KERNEL_BUILDER(Name("HvdcParts").Device(DEVICE_CPU), PartsOp);

}  // namespace
}  // namespace hvd_compress
