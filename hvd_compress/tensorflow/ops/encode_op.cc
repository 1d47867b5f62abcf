// Encodes one gradient together with its residual, which it updates in place.
#include <chrono>
#include <utility>

#include "codec_op.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace hvd_compress {
namespace {

using namespace tensorflow;  // NOLINT: the registration macros need it

// residual: a float32 variable, empty until the first step. exchanges: an int64 variable, how often
// the gradient has been exchanged; the first `warmup` times nothing is encoded and the payload is
// empty. step: the position in the noise, stamped on the payload. It does not fail, because the
// other ranks wait for a payload: they get zeros in its place, and the decoding operation fails.
REGISTER_OP("HvdcEncode")
    .Input("gradient: T")
    .Input("token: float")
    .Input("residual: resource")
    .Input("exchanges: resource")
    .Input("ledger: resource")
    .Output("payload: uint8")
    .Output("step: int64")
    .Attr("T: {float, half, bfloat16}")
    .Attr("label: string")
    .Attr("spec: string")
    .Attr("tensor: int")
    .Attr("threads: int")
    .Attr("alpha: float")
    .Attr("beta: float")
    .Attr("seed: int")
    .Attr("rank: int")
    .Attr("ranks: int")
    .Attr("warmup: int")
    .SetIsStateful()
    .SetShapeFn([](shape_inference::InferenceContext* c) {
      c->set_output(0, c->Vector(shape_inference::InferenceContext::kUnknownDim));
      c->set_output(1, c->Scalar());
      return absl::OkStatus();
    });

class EncodeOp : public CodecOp<OpKernel> {
 public:
  explicit EncodeOp(OpKernelConstruction* context) : CodecOp(context) {
    OP_REQUIRES_OK(context, context->GetAttr("seed", &seed_));
    OP_REQUIRES_OK(context, context->GetAttr("rank", &rank_));
    OP_REQUIRES_OK(context, context->GetAttr("ranks", &ranks_));
    OP_REQUIRES_OK(context, context->GetAttr("warmup", &warmup_));
  }

  void Compute(OpKernelContext* context) override {
    core::RefCountPtr<Var> residual, exchanges;
    core::RefCountPtr<Ledger> ledger;
    OP_REQUIRES_OK(context, Lookup(context, 2, &residual));
    OP_REQUIRES_OK(context, Lookup(context, 3, &exchanges));
    OP_REQUIRES_OK(context, Lookup(context, 4, &ledger));
    const Tensor& gradient = context->input(0);
    const int64_t step = NextExchange(exchanges.get()) - warmup_;
    Tensor* position;
    OP_REQUIRES_OK(context, context->allocate_output(1, {}, &position));
    position->scalar<int64_t>()() = step;
    ledger->Count(kUncompressedBytes, static_cast<double>(gradient.TotalBytes()));
    Tensor* payload;
    if (step < 0) {
      OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({0}), &payload));
      return;
    }
    const hvdc_spec spec = SpecFor(gradient.shape());
    const absl::StatusOr<int64_t> size = PayloadBytes(spec, gradient.shape());
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({size.value_or(0)}), &payload));
    const auto started = std::chrono::steady_clock::now();
    const absl::Status status =
        size.ok() ? Encode(context, spec, step, gradient, payload, residual.get()) : size.status();
    if (!status.ok()) {
      ledger->Fail(std::string(status.message()));
      payload->flat<uint8_t>().setZero();
      return;
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - started;
    ledger->Count(kEncodeSeconds, seconds.count());
    ledger->Count(kTensors, 1);
    ledger->Count(kElements, static_cast<double>(gradient.NumElements()));
    ledger->Count(kPayloadBytes, static_cast<double>(*size));
    if (feedback()) {
      ledger->Encoded(tensor_, Sent{gradient, *payload, std::move(residual), spec, alpha_, beta_,
                                    step, threads_});
    }
  }

 private:
  static int64_t NextExchange(Var* exchanges) {
    mutex_lock lock(*exchanges->mu());
    const int64_t before = exchanges->tensor()->scalar<int64_t>()();
    Tensor after(DT_INT64, TensorShape({}));  // a reader may still hold the old one
    after.scalar<int64_t>()() = before + 1;
    *exchanges->tensor() = after;
    return before;
  }

  absl::StatusOr<int64_t> PayloadBytes(const hvdc_spec& spec, const TensorShape& shape) const {
    const int64_t size = hvdc_payload_bytes(&spec);
    if (size >= 0 && size * ranks_ < (int64_t{1} << 31)) return size;
    return errors::InvalidArgument(label_, ", shape ", shape.DebugString(),
                                   ": expected fewer than 2^31 bytes in one gather, got ", ranks_,
                                   " ranks times ", size);
  }

  absl::Status Encode(OpKernelContext* context, const hvdc_spec& spec, int64_t step,
                      const Tensor& gradient, Tensor* payload, Var* residual) const {
    const hvdc_noise noise{static_cast<uint32_t>(seed_), static_cast<uint32_t>(rank_),
                           static_cast<uint32_t>(tensor_), 0, static_cast<uint64_t>(step)};
    hvdc_feedback feedback{alpha_, beta_, nullptr};
    mutex_lock lock(*residual->mu());
    if (this->feedback()) {
      TF_RETURN_IF_ERROR(Prepare(context, gradient.NumElements(), residual));
      feedback.residual = residual->tensor()->flat<float>().data();
    }
    const int status = hvdc_encode(&spec, &noise, gradient.data(), DtypeOf(gradient.dtype()),
                                   feedback.residual ? &feedback : nullptr, payload->data(),
                                   payload->NumElements(), threads_);
    if (status == HVDC_OK) return absl::OkStatus();
    return errors::Internal(label_, ": encoding failed with status ", status);
  }

  // Makes the residual one float32 an element that nobody else reads, zeros at first.
  absl::Status Prepare(OpKernelContext* context, int64_t count, Var* residual) const {
    Tensor* held = residual->tensor();
    const bool fresh = held->NumElements() == 0;
    if (!fresh && held->NumElements() != count) {
      return errors::InvalidArgument(label_, ": expected a gradient of ", held->NumElements(),
                                     " elements as in the steps before, got ", count,
                                     ": make a compressor for each model");
    }
    if (!fresh && held->RefCountIsOne()) return absl::OkStatus();
    Tensor own;
    TF_RETURN_IF_ERROR(context->allocate_temp(DT_FLOAT, TensorShape({count}), &own));
    if (fresh) {
      own.flat<float>().setZero();
    } else {
      own.flat<float>() = held->flat<float>();
    }
    *held = own;
    return absl::OkStatus();
  }

  int64_t seed_, warmup_;
  int rank_, ranks_;
};
REGISTER_KERNEL_BUILDER(Name("HvdcEncode").Device(DEVICE_CPU), EncodeOp);

}  // namespace
}  // namespace hvd_compress
