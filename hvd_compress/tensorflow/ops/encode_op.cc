// Encodes one gradient together with its residual, which it updates in place.
#include <chrono>
#include <numeric>
#include <utility>
#include <vector>

#include "coder.h"
#include "tensorflow/core/common_runtime/input_colocation_exemption_registry.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace hvd_compress {
namespace {

using namespace tensorflow;  // NOLINT: the registration macros need it

// begins, lengths: the pieces of the gradient for each owner, encoded one after the other into the
// message; none for the whole gradient as one payload. streams: the rank in each one's noise key.
// step: the position in the noise, stamped on the payloads; while it is negative nothing is encoded
// and the message is empty. residual: a float32 variable, empty until the first step. It does not
// fail, because the other ranks wait for a message: they get zeros in its place, and the decoding
// operation fails.
REGISTER_OP("HvdcEncode")
    .Input("gradient: T")
    .Input("step: int64")
    .Input("residual: resource")
    .Input("ledger: resource")
    .Output("message: uint8")
    .Attr("T: {float, half, bfloat16}")
    .Attr("label: string")
    .Attr("spec: string")
    .Attr("tensor: int")
    .Attr("threads: int")
    .Attr("alpha: float")
    .Attr("beta: float")
    .Attr("seed: int")
    .Attr("begins: list(int)")
    .Attr("lengths: list(int)")
    .Attr("streams: list(int)")
    .Attr("ranks: int")
    .SetIsStateful()
    .SetShapeFn([](shape_inference::InferenceContext* c) {
      c->set_output(0, c->Vector(shape_inference::InferenceContext::kUnknownDim));
      return absl::OkStatus();
    });

class EncodeOp : public OpKernel {
 public:
  explicit EncodeOp(OpKernelConstruction* context) : OpKernel(context), coder_(context) {
    OP_REQUIRES_OK(context, context->GetAttr("seed", &seed_));
    OP_REQUIRES_OK(context, context->GetAttr("begins", &begins_));
    OP_REQUIRES_OK(context, context->GetAttr("lengths", &lengths_));
    OP_REQUIRES_OK(context, context->GetAttr("streams", &streams_));
    OP_REQUIRES_OK(context, context->GetAttr("ranks", &ranks_));
  }

  void Compute(OpKernelContext* context) override {
    core::RefCountPtr<Var> residual;
    core::RefCountPtr<Ledger> ledger;
    OP_REQUIRES_OK(context, LookupResource(context, HandleFromInput(context, 2), &residual));
    OP_REQUIRES_OK(context, LookupLedger(context, 3, &ledger));
    const Tensor& gradient = context->input(0);
    const int64_t step = context->input(1).scalar<int64_t>()();
    ledger->Ready(static_cast<double>(gradient.TotalBytes()));
    Tensor* message;
    if (step < 0) {
      OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({0}), &message));
      return;
    }
    const bool whole = lengths_.empty();
    std::vector<Piece> pieces = whole ? std::vector<Piece>{coder_.Whole(gradient.shape())}
                                      : coder_.Parts(begins_, lengths_);
    absl::Status status = whole ? CheckGather(pieces[0], gradient.shape()) : CheckParts(gradient);
    const auto kernels = coder_.KernelsFor(context, ledger.get());
    if (status.ok()) status = kernels.status();
    // Parts have a size of their own: the other ranks wait for so many bytes.
    const int64_t size = status.ok() || !whole ? MessageBytes(pieces, 1) : 0;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({size}), &message));
    const auto started = std::chrono::steady_clock::now();
    if (status.ok()) {
      status = coder_.Encode(context, kernels->get(), pieces, streams_, seed_, step, gradient,
                             message, residual.get());
    }
    if (!status.ok()) {
      ledger->Fail(std::string(status.message()));
      if (kernels.ok()) OP_REQUIRES_OK(context, (*kernels)->Zero(message->data(), size));
      return;
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - started;
    ledger->Count(kEncodeSeconds, seconds.count());
    ledger->Count(kTensors, 1);
    ledger->Count(kElements, static_cast<double>(gradient.NumElements()));
    if (whole) ledger->Count(kGatheredBytes, static_cast<double>(size));
    if (coder_.feedback()) {
      ledger->Encoded(coder_.ToTakeBack(*kernels, std::move(pieces), step, gradient, *message,
                                        std::move(residual)));
    }
  }

 private:
  // Where tracing did not know the shape, it could not check this.
  absl::Status CheckGather(const Piece& piece, const TensorShape& shape) const {
    if (piece.bytes >= 0 && piece.bytes * ranks_ < (int64_t{1} << 31)) return absl::OkStatus();
    return errors::InvalidArgument(coder_.label(), ", shape ", shape.DebugString(),
                                   ": expected fewer than 2^31 bytes in one gather, got ", ranks_,
                                   " ranks times ", piece.bytes);
  }

  // Parts were cut while tracing, from the shape as it was first known.
  absl::Status CheckParts(const Tensor& gradient) const {
    const int64_t count = std::accumulate(lengths_.begin(), lengths_.end(), int64_t{0});
    return coder_.CheckTraced(count, gradient);
  }

  Coder coder_;
  std::vector<int64_t> begins_, lengths_, streams_;
  int64_t seed_;
  int ranks_;
};
REGISTER_KERNEL_BUILDER(Name("HvdcEncode").Device(DEVICE_CPU), EncodeOp);
REGISTER_KERNEL_BUILDER(Name("HvdcEncode")
                            .Device(DEVICE_GPU)
                            .HostMemory("step")
                            .HostMemory("residual")
                            .HostMemory("ledger"),
                        EncodeOp);
// The residual is where the gradient is, but the ledger is the host's.
REGISTER_INPUT_COLOCATION_EXEMPTION("HvdcEncode");

}  // namespace
}  // namespace hvd_compress
