// An owner's work between two shots: averages all ranks' payloads of its part, and encodes the
// average together with a residual of its own, which it updates in place.
#include <chrono>
#include <utility>

#include "coder.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace hvd_compress {
namespace {

using namespace tensorflow;  // NOLINT: the registration macros need it

// parts: the ranks' payloads, one after the other. residual: a float32 variable, empty until the
// first step. length: elements of the part; with none, there is nothing to do. distributed: bytes
// that this rank sent to all owners. It does not fail: the other ranks would wait for an average,
// and get zeros in its place.
REGISTER_OP("HvdcAverage")
    .Input("parts: uint8")
    .Input("step: int64")
    .Input("residual: resource")
    .Input("ledger: resource")
    .Output("average: uint8")
    .Attr("label: string")
    .Attr("spec: string")
    .Attr("tensor: int")
    .Attr("threads: int")
    .Attr("alpha: float")
    .Attr("beta: float")
    .Attr("seed: int")
    .Attr("length: int")
    .Attr("stream: int")
    .Attr("ranks: int")
    .Attr("distributed: int")
    .SetIsStateful()
    .SetShapeFn([](shape_inference::InferenceContext* c) {
      c->set_output(0, c->Vector(shape_inference::InferenceContext::kUnknownDim));
      return absl::OkStatus();
    });

class AverageOp : public OpKernel {
 public:
  explicit AverageOp(OpKernelConstruction* context) : OpKernel(context), coder_(context) {
    OP_REQUIRES_OK(context, context->GetAttr("seed", &seed_));
    OP_REQUIRES_OK(context, context->GetAttr("length", &length_));
    OP_REQUIRES_OK(context, context->GetAttr("stream", &stream_));
    OP_REQUIRES_OK(context, context->GetAttr("ranks", &ranks_));
    OP_REQUIRES_OK(context, context->GetAttr("distributed", &distributed_));
  }

  void Compute(OpKernelContext* context) override {
    core::RefCountPtr<Var> residual;
    core::RefCountPtr<Ledger> ledger;
    OP_REQUIRES_OK(context, Lookup(context, 2, &residual));
    OP_REQUIRES_OK(context, Lookup(context, 3, &ledger));
    std::vector<Piece> pieces = coder_.Parts({0}, {length_});
    const int64_t size = MessageBytes(pieces, 1);
    Tensor* payload;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({size}), &payload));
    ledger->Count(kDistributedBytes, static_cast<double>(distributed_));
    ledger->Count(kKeptBytes, static_cast<double>(size));
    ledger->Count(kGatheredBytes, static_cast<double>(size));
    if (size == 0) return;
    const int64_t step = context->input(1).scalar<int64_t>()();
    Tensor average;
    OP_REQUIRES_OK(context, context->allocate_temp(DT_FLOAT, TensorShape({length_}), &average));
    const auto started = std::chrono::steady_clock::now();
    bool nonfinite = false;  // the average will be, too
    absl::Status status = coder_.Decode(pieces, Source::kRanks, ranks_, 1.0f / ranks_, step,
                                        context->input(0), &average, &nonfinite);
    const auto decoded = std::chrono::steady_clock::now();
    if (status.ok()) {
      status =
          coder_.Encode(context, pieces, {stream_}, seed_, step, average, payload, residual.get());
    }
    if (!status.ok()) {
      ledger->Fail(absl::StrCat("as its owner: ", status.message()));
      payload->flat<uint8_t>().setZero();
      return;
    }
    const std::chrono::duration<double> decoding = decoded - started;
    const std::chrono::duration<double> encoding = std::chrono::steady_clock::now() - decoded;
    ledger->Count(kDecodeSeconds, decoding.count());
    ledger->Count(kEncodeSeconds, encoding.count());
    if (coder_.feedback()) {
      ledger->Encoded(
          coder_.ToTakeBack(std::move(pieces), step, average, *payload, std::move(residual)));
    }
  }

 private:
  Coder coder_;
  int64_t seed_, length_, stream_, distributed_;
  int ranks_;
};
REGISTER_KERNEL_BUILDER(Name("HvdcAverage").Device(DEVICE_CPU), AverageOp);

}  // namespace
}  // namespace hvd_compress
