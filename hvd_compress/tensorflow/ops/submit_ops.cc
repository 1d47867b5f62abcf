// A gradient's own operations: one gives it to its bucket, the other waits for its result.
#include <memory>
#include <utility>

#include "bucket.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace hvd_compress {
namespace {

using namespace tensorflow;  // NOLINT: the registration macros need it

// begun: the tensor on which the step's messages depend. residual, owned, exchanges: see Member.
// submitted: the token that stands for the gradient in Horovod's allreduce. bucket, member: the
// numbers of the bucket and of its member.
REGISTER_OP("HvdcSubmit")
    .Input("gradient: T")
    .Input("begun: float")
    .Input("residual: resource")
    .Input("owned: resource")
    .Input("exchanges: resource")
    .Input("ledger: resource")
    .Output("submitted: float")
    .Attr("T: {float, half, bfloat16}")
    .Attr("bucket: int")
    .Attr("member: int")
    .SetIsStateful()
    .SetShapeFn([](shape_inference::InferenceContext* c) {
      c->set_output(0, c->Vector(1));
      return absl::OkStatus();
    });

class SubmitOp : public OpKernel {
 public:
  explicit SubmitOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("bucket", &bucket_));
    OP_REQUIRES_OK(context, context->GetAttr("member", &member_));
  }

  void Compute(OpKernelContext* context) override {
    Member member;
    OP_REQUIRES_OK(context, Lookup(context, 2, &member.residual));
    OP_REQUIRES_OK(context, Lookup(context, 3, &member.owned));
    OP_REQUIRES_OK(context, Lookup(context, 4, &member.exchanges));
    const auto found = LookupBucket(context, 5, bucket_);
    OP_REQUIRES_OK(context, found.status());
    member.gradient = context->input(0);
    found->ledger->Count(kUncompressedBytes, static_cast<double>(member.gradient.TotalBytes()));
    context->set_output(0, context->input(1));
    found->bucket->Submit(member_, std::move(member));
  }

 private:
  int64_t bucket_, member_;
};
HVDC_REGISTER("HvdcSubmit", SubmitOp,
              .HostMemory("begun")
                  .HostMemory("residual")
                  .HostMemory("owned")
                  .HostMemory("exchanges")
                  .HostMemory("ledger")
                  .HostMemory("submitted"));

// submitted: the token of the gradient, which has the result's shape. An error waits for the step's
// other gradients.
REGISTER_OP("HvdcResult")
    .Input("submitted: float")
    .Input("gradient: T")
    .Input("ledger: resource")
    .Output("result: T")
    .Attr("T: {float, half, bfloat16}")
    .Attr("bucket: int")
    .Attr("member: int")
    .SetIsStateful()
    .SetShapeFn([](shape_inference::InferenceContext* c) {
      c->set_output(0, c->input(1));
      return absl::OkStatus();
    });

class ResultOp : public AsyncOpKernel {
 public:
  explicit ResultOp(OpKernelConstruction* context) : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("bucket", &bucket_));
    OP_REQUIRES_OK(context, context->GetAttr("member", &member_));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    auto found = LookupBucket(context, 2, bucket_);
    OP_REQUIRES_OK_ASYNC(context, found.status(), done);
    Ledger* const ledger = found->ledger.release();
    const auto end = [context, ledger, done = std::move(done)](const absl::Status& status) {
      if (!status.ok()) context->SetStatus(status);
      ledger->Unref();
      done();
    };
    const auto then = [context, ledger, bucket = found->bucket, number = member_,
                       end](bool happened) {
      if (!happened) return end(errors::Cancelled("the step was cancelled"));
      Member& member = bucket->members[number];
      if (!member.status.ok()) {
        return ledger->ReturnedInVain([end, status = member.status] { end(status); },
                                      context->cancellation_manager());
      }
      context->set_output(0, std::exchange(member.result, Tensor()));
      ledger->Returned();
      end(absl::OkStatus());
    };
    found->bucket->decoded->Wait(then, context->cancellation_manager());
  }

 private:
  int64_t bucket_, member_;
};
HVDC_REGISTER("HvdcResult", ResultOp, .HostMemory("submitted").HostMemory("ledger"));

}  // namespace
}  // namespace hvd_compress
