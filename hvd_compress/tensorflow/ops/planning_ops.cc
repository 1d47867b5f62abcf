// What a planner needs of a step: its end, its time, and a way to be asked only now and then.
#include <algorithm>
#include <functional>
#include <utility>

#include "ledger.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace hvd_compress {
namespace {

using namespace tensorflow;  // NOLINT: the registration macros need it

// Ends when all of the step's gradients are back, on every rank that counts steps after the same
// one. Traced where the step begins, since tracing does not know which gradient is the last.
// everybody: whether all ranks take part in the step. wanted: whether the planner has something to
// do now.
REGISTER_OP("HvdcStepEnd")
    .Input("everybody: bool")
    .Input("ledger: resource")
    .Output("wanted: bool")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape);

class StepEndOp : public AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    core::RefCountPtr<Ledger> ledger;
    OP_REQUIRES_OK_ASYNC(context, LookupLedger(context, 1, &ledger), done);
    Tensor* wanted;
    OP_REQUIRES_OK_ASYNC(context, context->allocate_output(0, {}, &wanted), done);
    Ledger* const kept = ledger.release();
    kept->AtEnd(
        [context, kept, wanted, done = std::move(done)] {
          auto* const cancellation = context->cancellation_manager();
          const bool failed =
              !kept->failure().empty() || (cancellation && cancellation->IsCancelled());
          const bool everybody = context->input(0).scalar<bool>()();
          wanted->scalar<bool>()() = !failed && kept->Over(everybody);
          kept->Unref();
          done();
        },
        context->cancellation_manager());
  }
};
REGISTER_KERNEL_BUILDER(Name("HvdcStepEnd").Device(DEVICE_CPU), StepEndOp);

// seconds, windows: of the steps since the planner was scheduled; steps: since the count began.
REGISTER_OP("HvdcPace")
    .Input("ledger: resource")
    .Output("seconds: double")
    .Output("windows: double")
    .Output("steps: int64")
    .SetIsStateful()
    .SetShapeFn([](shape_inference::InferenceContext* c) {
      c->set_output(0, c->Vector(shape_inference::InferenceContext::kUnknownDim));
      c->set_output(1, c->Vector(shape_inference::InferenceContext::kUnknownDim));
      c->set_output(2, c->Scalar());
      return absl::OkStatus();
    });

class PaceOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    core::RefCountPtr<Ledger> ledger;
    OP_REQUIRES_OK(context, LookupLedger(context, 0, &ledger));
    const Pace pace = ledger->pace();
    const auto count = static_cast<int64_t>(pace.seconds.size());
    Tensor *seconds, *windows, *steps;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({count}), &seconds));
    OP_REQUIRES_OK(context, context->allocate_output(1, TensorShape({count}), &windows));
    OP_REQUIRES_OK(context, context->allocate_output(2, {}, &steps));
    std::copy(pace.seconds.begin(), pace.seconds.end(), seconds->flat<double>().data());
    std::copy(pace.windows.begin(), pace.windows.end(), windows->flat<double>().data());
    steps->scalar<int64_t>()() = pace.steps;
  }
};
REGISTER_KERNEL_BUILDER(Name("HvdcPace").Device(DEVICE_CPU), PaceOp);

// steps: the planner is wanted at the end of the so many-th from now, never if negative. anew:
// whether the count of steps begins with the next one.
REGISTER_OP("HvdcSchedule")
    .Input("ledger: resource")
    .Input("steps: int64")
    .Input("anew: bool")
    .SetIsStateful()
    .SetShapeFn(shape_inference::NoOutputs);

class ScheduleOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    core::RefCountPtr<Ledger> ledger;
    OP_REQUIRES_OK(context, LookupLedger(context, 0, &ledger));
    ledger->Schedule(context->input(1).scalar<int64_t>()(), context->input(2).scalar<bool>()());
  }
};
REGISTER_KERNEL_BUILDER(Name("HvdcSchedule").Device(DEVICE_CPU), ScheduleOp);

}  // namespace
}  // namespace hvd_compress
