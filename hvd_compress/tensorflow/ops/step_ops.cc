// The operations around a step: the ledger, its beginning, gradients that go as they are, counters.
#include <algorithm>

#include "ledger.h"
#include "tensorflow/core/common_runtime/input_colocation_exemption_registry.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace hvd_compress {
namespace {

using namespace tensorflow;  // NOLINT: the registration macros need it

REGISTER_OP("HvdcLedger")
    .Output("ledger: resource")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape);

class LedgerOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    Tensor* handle;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &handle));
    handle->scalar<ResourceHandle>()() =
        ResourceHandle::MakeRefCountingHandle(new Ledger, context->device()->name());
  }
};
REGISTER_KERNEL_BUILDER(Name("HvdcLedger").Device(DEVICE_CPU), LedgerOp);

// Says how many gradients come back in a step of a graph, known only when it has been traced.
REGISTER_OP("HvdcExpect")
    .Input("ledger: resource")
    .Attr("graph: int")
    .Attr("count: int")
    .SetIsStateful()
    .SetShapeFn(shape_inference::NoOutputs);

class ExpectOp : public OpKernel {
 public:
  explicit ExpectOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("graph", &graph_));
    OP_REQUIRES_OK(context, context->GetAttr("count", &count_));
  }

  void Compute(OpKernelContext* context) override {
    core::RefCountPtr<Ledger> ledger;
    OP_REQUIRES_OK(context, LookupLedger(context, 0, &ledger));
    ledger->Expect(graph_, count_);
  }

 private:
  int64_t graph_, count_;
};
REGISTER_KERNEL_BUILDER(Name("HvdcExpect").Device(DEVICE_CPU), ExpectOp);

// Starts a step of a graph. token: what the step's messages depend on, and what Horovod allreduces
// in their place. standing: what is to be said in the roll call, whether this rank's settings are
// yet to be compared, and whether it has failed.
REGISTER_OP("HvdcBegin")
    .Input("ledger: resource")
    .Output("token: float")
    .Output("standing: float")
    .Attr("graph: int")
    .SetIsStateful()
    .SetShapeFn([](shape_inference::InferenceContext* c) {
      c->set_output(0, c->Vector(1));
      c->set_output(1, c->Vector(2));
      return absl::OkStatus();
    });

class BeginOp : public OpKernel {
 public:
  explicit BeginOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("graph", &graph_));
  }

  void Compute(OpKernelContext* context) override {
    core::RefCountPtr<Ledger> ledger;
    OP_REQUIRES_OK(context, LookupLedger(context, 0, &ledger));
    const Standing now = ledger->Begin(graph_);
    Tensor *token, *standing;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({1}), &token));
    OP_REQUIRES_OK(context, context->allocate_output(1, TensorShape({2}), &standing));
    token->flat<float>()(0) = 1.0f;
    standing->flat<float>()(0) = now.agreed ? 0.0f : 1.0f;
    standing->flat<float>()(1) = now.failed ? 1.0f : 0.0f;
  }

 private:
  int64_t graph_;
};
REGISTER_KERNEL_BUILDER(Name("HvdcBegin").Device(DEVICE_CPU), BeginOp);

REGISTER_OP("HvdcAgree")
    .Input("ledger: resource")
    .Attr("agreed: bool")
    .SetIsStateful()
    .SetShapeFn(shape_inference::NoOutputs);

class AgreeOp : public OpKernel {
 public:
  explicit AgreeOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("agreed", &agreed_));
  }

  void Compute(OpKernelContext* context) override {
    core::RefCountPtr<Ledger> ledger;
    OP_REQUIRES_OK(context, LookupLedger(context, 0, &ledger));
    ledger->Agree(agreed_);
  }

 private:
  bool agreed_;
};
REGISTER_KERNEL_BUILDER(Name("HvdcAgree").Device(DEVICE_CPU), AgreeOp);

// What failed here in an earlier step, or an empty string; it is told once. late: whether that step
// itself has raised no error.
REGISTER_OP("HvdcEarlierFailure")
    .Input("ledger: resource")
    .Output("message: string")
    .Output("late: bool")
    .SetIsStateful()
    .SetShapeFn([](shape_inference::InferenceContext* c) {
      c->set_output(0, c->Scalar());
      c->set_output(1, c->Scalar());
      return absl::OkStatus();
    });

class EarlierFailureOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    core::RefCountPtr<Ledger> ledger;
    OP_REQUIRES_OK(context, LookupLedger(context, 0, &ledger));
    Tensor *message, *late;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &message));
    OP_REQUIRES_OK(context, context->allocate_output(1, {}, &late));
    const EarlierFailure failure = ledger->TakeEarlierFailure();
    message->scalar<tstring>()() = failure.message;
    late->scalar<bool>()() = failure.late;
  }
};
REGISTER_KERNEL_BUILDER(Name("HvdcEarlierFailure").Device(DEVICE_CPU), EarlierFailureOp);

// A gradient's position in the noise: how often it has been exchanged before, less `warmup`; counts
// one more. exchanges: an int64 variable. On the host, whatever device encodes: it decides what is
// sent.
REGISTER_OP("HvdcPosition")
    .Input("token: float")
    .Input("exchanges: resource")
    .Output("step: int64")
    .Attr("warmup: int")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape);

class PositionOp : public OpKernel {
 public:
  explicit PositionOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("warmup", &warmup_));
  }

  void Compute(OpKernelContext* context) override {
    core::RefCountPtr<Var> exchanges;
    OP_REQUIRES_OK(context, LookupResource(context, HandleFromInput(context, 1), &exchanges));
    Tensor* step;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &step));
    mutex_lock lock(*exchanges->mu());
    const int64_t before = exchanges->tensor()->scalar<int64_t>()();
    Tensor after(DT_INT64, TensorShape({}));  // a reader may still hold the old one
    after.scalar<int64_t>()() = before + 1;
    *exchanges->tensor() = after;
    step->scalar<int64_t>()() = before - warmup_;
  }

 private:
  int64_t warmup_;
};
REGISTER_KERNEL_BUILDER(Name("HvdcPosition").Device(DEVICE_CPU), PositionOp);

// The gradient itself, counted, once the step has begun.
REGISTER_OP("HvdcDense")
    .Input("gradient: T")
    .Input("token: float")
    .Input("ledger: resource")
    .Output("sent: T")
    .Attr("T: {float, half, bfloat16, double}")
    .Attr("uncompressed_item_bytes: int")
    .SetIsStateful()
    .SetShapeFn(shape_inference::UnchangedShape);

class DenseOp : public OpKernel {
 public:
  explicit DenseOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("uncompressed_item_bytes", &item_bytes_));
  }

  void Compute(OpKernelContext* context) override {
    core::RefCountPtr<Ledger> ledger;
    OP_REQUIRES_OK(context, LookupLedger(context, 2, &ledger));
    const Tensor& gradient = context->input(0);
    ledger->Ready(static_cast<double>(gradient.NumElements()) * item_bytes_);
    ledger->Count(kDenseBytes, static_cast<double>(gradient.TotalBytes()));
    context->set_output(0, gradient);
  }

 private:
  int item_bytes_;
};
REGISTER_KERNEL_BUILDER(Name("HvdcDense").Device(DEVICE_CPU), DenseOp);
REGISTER_KERNEL_BUILDER(
    Name("HvdcDense").Device(DEVICE_GPU).HostMemory("token").HostMemory("ledger"), DenseOp);
REGISTER_INPUT_COLOCATION_EXEMPTION("HvdcDense");

// What Horovod made of such a gradient, once it is back.
REGISTER_OP("HvdcArrived")
    .Input("reduced: T")
    .Input("ledger: resource")
    .Output("gradient: T")
    .Attr("T: {float, half, bfloat16, double}")
    .SetIsStateful()
    .SetShapeFn(shape_inference::UnchangedShape);

class ArrivedOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    core::RefCountPtr<Ledger> ledger;
    OP_REQUIRES_OK(context, LookupLedger(context, 1, &ledger));
    context->set_output(0, context->input(0));
    ledger->Arrived();
  }
};
REGISTER_KERNEL_BUILDER(Name("HvdcArrived").Device(DEVICE_CPU), ArrivedOp);
REGISTER_KERNEL_BUILDER(Name("HvdcArrived").Device(DEVICE_GPU).HostMemory("ledger"), ArrivedOp);
REGISTER_INPUT_COLOCATION_EXEMPTION("HvdcArrived");

REGISTER_OP("HvdcCounters")
    .Input("ledger: resource")
    .Output("values: double")
    .SetIsStateful()
    .SetShapeFn([](shape_inference::InferenceContext* c) {
      c->set_output(0, c->Vector(kCounters));
      return absl::OkStatus();
    });

class CountersOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    core::RefCountPtr<Ledger> ledger;
    OP_REQUIRES_OK(context, LookupLedger(context, 0, &ledger));
    Tensor* values;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({kCounters}), &values));
    const auto counters = ledger->counters();
    std::copy(counters.begin(), counters.end(), values->flat<double>().data());
  }
};
REGISTER_KERNEL_BUILDER(Name("HvdcCounters").Device(DEVICE_CPU), CountersOp);

}  // namespace
}  // namespace hvd_compress
