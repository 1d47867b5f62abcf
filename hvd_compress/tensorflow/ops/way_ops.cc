// A gradient that can travel in several ways: what leaves it for Horovod's own allreduce, what
// other ways release to it, and what it becomes.
#include "gradient_codec.h"
#include "ledger.h"
#include "release.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace hvd_compress {
namespace {

using namespace tensorflow;  // NOLINT: the registration macros need it

// Adds what is left unsent to a gradient that takes another way now. everybody: whether all ranks
// take part in the step; if not, residuals wait.
REGISTER_OP("HvdcRelease")
    .Input("gradient: T")
    .Input("everybody: bool")
    .Input("ledger: resource")
    .Input("residuals: N * resource")
    .Output("released: T")
    .Attr("T: {float, half, bfloat16}")
    .Attr("N: int >= 0")
    .Attr("label: string")
    .Attr("begins: list(int)")
    .Attr("weights: list(float)")
    .SetIsStateful()
    .SetShapeFn(shape_inference::UnchangedShape);

template <typename T>
class ReleaseOp : public OpKernel {
 public:
  explicit ReleaseOp(OpKernelConstruction* context) : OpKernel(context), release_(context) {}

  void Compute(OpKernelContext* context) override {
    core::RefCountPtr<Ledger> ledger;
    OP_REQUIRES_OK(context, LookupLedger(context, 2, &ledger));
    Tensor released = context->input(0);
    if (context->input(1).scalar<bool>()()) {
      OP_REQUIRES_OK(context, release_.Add<T>(context, context->input(0), ledger.get(), &released));
    }
    context->set_output(0, released);
  }

 private:
  Release release_;
};
#define HVDC_REGISTER(T)                                                                 \
  REGISTER_KERNEL_BUILDER(Name("HvdcRelease").Device(DEVICE_CPU).TypeConstraint<T>("T"), \
                          ReleaseOp<T>)
HVDC_REGISTER(float);
HVDC_REGISTER(Eigen::half);
HVDC_REGISTER(bfloat16);
#undef HVDC_REGISTER

// Gives Horovod a gradient that goes as it is, with what other ways have left unsent, or else a
// token. ways: which of its choices each gradient takes, 0 being as it is, as are all where not
// everybody takes part. way: this one's. uncompressed_item_bytes: of the gradient before it was
// cast for Horovod.
REGISTER_OP("HvdcSend")
    .Input("gradient: T")
    .Input("token: float")
    .Input("everybody: bool")
    .Input("ways: int32")
    .Input("ledger: resource")
    .Input("residuals: N * resource")
    .Output("sent: T")
    .Output("way: int32")
    .Attr("T: {float, half}")
    .Attr("N: int >= 0")
    .Attr("label: string")
    .Attr("begins: list(int)")
    .Attr("weights: list(float)")
    .Attr("position: int")
    .Attr("uncompressed_item_bytes: int")
    .SetIsStateful()
    .SetShapeFn([](shape_inference::InferenceContext* c) {
      c->set_output(0, c->Vector(shape_inference::InferenceContext::kUnknownDim));
      c->set_output(1, c->Scalar());
      return absl::OkStatus();
    });

template <typename T>
class SendOp : public OpKernel {
 public:
  explicit SendOp(OpKernelConstruction* context) : OpKernel(context), release_(context) {
    OP_REQUIRES_OK(context, context->GetAttr("position", &position_));
    OP_REQUIRES_OK(context, context->GetAttr("uncompressed_item_bytes", &item_bytes_));
  }

  void Compute(OpKernelContext* context) override {
    core::RefCountPtr<Ledger> ledger;
    OP_REQUIRES_OK(context, LookupLedger(context, 4, &ledger));
    const Tensor &gradient = context->input(0), &ways = context->input(3);
    const bool everybody = context->input(2).scalar<bool>()();
    OP_REQUIRES(context, position_ < ways.NumElements(),
                errors::Internal("expected a way for each gradient, got ", ways.NumElements()));
    Tensor *way, *token;
    OP_REQUIRES_OK(context, context->allocate_output(1, {}, &way));
    way->scalar<int32_t>()() = everybody ? ways.flat<int32_t>()(position_) : 0;
    if (way->scalar<int32_t>()() != 0) {
      OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({1}), &token));
      token->flat<T>()(0) = static_cast<T>(context->input(1).flat<float>()(0));
      return;
    }
    ledger->Ready(static_cast<double>(gradient.NumElements()) * item_bytes_);
    Tensor released = gradient;
    if (everybody) {
      OP_REQUIRES_OK(context, release_.Add<T>(context, gradient, ledger.get(), &released));
    }
    Tensor flat;
    CHECK(flat.CopyFrom(released, TensorShape({released.NumElements()})));
    ledger->Count(kDenseBytes, static_cast<double>(flat.TotalBytes()));
    context->set_output(0, flat);
  }

 private:
  Release release_;
  int64_t position_;
  int item_bytes_;
};
#define HVDC_REGISTER(T) \
  REGISTER_KERNEL_BUILDER(Name("HvdcSend").Device(DEVICE_CPU).TypeConstraint<T>("T"), SendOp<T>)
HVDC_REGISTER(float);
HVDC_REGISTER(Eigen::half);
#undef HVDC_REGISTER

// The result of whichever way a gradient took, in its shape: what Horovod made of it if it went as
// it was, or else what its way made.
REGISTER_OP("HvdcReceive")
    .Input("reduced: T")
    .Input("made: T")
    .Input("gradient: T")
    .Input("way: int32")
    .Input("ledger: resource")
    .Output("result: T")
    .Attr("T: {float, half, bfloat16}")
    .SetIsStateful()
    .SetShapeFn([](shape_inference::InferenceContext* c) {
      c->set_output(0, c->input(2));
      return absl::OkStatus();
    });

class ReceiveOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    core::RefCountPtr<Ledger> ledger;
    OP_REQUIRES_OK(context, LookupLedger(context, 4, &ledger));
    if (context->input(3).scalar<int32_t>()() != 0) {
      context->set_output(0, context->input(1));
      return;
    }
    const Tensor &reduced = context->input(0), &gradient = context->input(2);
    Tensor result;
    OP_REQUIRES(context, result.CopyFrom(reduced, gradient.shape()),
                errors::DataLoss("expected a sum of ", gradient.NumElements(), " numbers, got ",
                                 reduced.NumElements()));
    context->set_output(0, result);
    ledger->Arrived();
  }
};
REGISTER_KERNEL_BUILDER(Name("HvdcReceive").Device(DEVICE_CPU), ReceiveOp);

}  // namespace
}  // namespace hvd_compress
