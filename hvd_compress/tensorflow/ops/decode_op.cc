// Decodes and adds all ranks' payloads, or takes the sum that went uncompressed.
#include <chrono>
#include <cstring>

#include "codec/layout.h"
#include "codec_op.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace hvd_compress {
namespace {

using namespace tensorflow;  // NOLINT: the registration macros need it

// message: the ranks' payloads one after the other or, where `gathered` is false, the float32 sum
// of their gradients. payload: this rank's, as encoded from gradient. reduced: the token, which
// tells that Horovod has finished, too.
REGISTER_OP("HvdcDecode")
    .Input("message: uint8")
    .Input("gathered: bool")
    .Input("reduced: float")
    .Input("gradient: T")
    .Input("payload: uint8")
    .Input("step: int64")
    .Input("ledger: resource")
    .Output("sum: T")
    .Attr("T: {float, half, bfloat16}")
    .Attr("label: string")
    .Attr("spec: string")
    .Attr("tensor: int")
    .Attr("threads: int")
    .Attr("alpha: float")
    .Attr("beta: float")
    .Attr("ranks: int")
    .Attr("scale: float")
    .SetIsStateful()
    .SetShapeFn([](shape_inference::InferenceContext* c) {
      c->set_output(0, c->input(3));
      return absl::OkStatus();
    });

class DecodeOp : public CodecOp<AsyncOpKernel> {
 public:
  explicit DecodeOp(OpKernelConstruction* context) : CodecOp(context) {
    OP_REQUIRES_OK(context, context->GetAttr("ranks", &ranks_));
    OP_REQUIRES_OK(context, context->GetAttr("scale", &scale_));
  }

  // Asynchronous because of its errors, which wait for the step's other gradients.
  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    core::RefCountPtr<Ledger> ledger;
    OP_REQUIRES_OK_ASYNC(context, Lookup(context, 6, &ledger), done);
    const absl::Status status = Result(context, ledger.get());
    if (status.ok()) {
      ledger->Arrived();
      done();
      return;
    }
    ledger->Fail(std::string(status.message()));
    ledger->Decoded(/*drop=*/true).IgnoreError();  // The first error is the one to tell.
    const auto end = [context, status, done = std::move(done)] {
      context->SetStatus(status);
      done();
    };
    ledger->ArrivedInVain(end, context->cancellation_manager());
  }

 private:
  absl::Status Result(OpKernelContext* context, Ledger* ledger) const {
    const std::string failure = ledger->failure();
    if (!failure.empty()) return errors::DataLoss(failure);
    const Tensor& message = context->input(0);
    const bool gathered = context->input(1).scalar<bool>()();
    const Tensor& gradient = context->input(3);
    Tensor* sum;
    TF_RETURN_IF_ERROR(context->allocate_output(0, gradient.shape(), &sum));
    const auto started = std::chrono::steady_clock::now();
    bool drop = !gathered;
    if (gathered) {
      TF_RETURN_IF_ERROR(Decode(context, message, sum, &drop));
    } else {
      TF_RETURN_IF_ERROR(Scale(message, sum));
      ledger->Count(kDenseBytes, static_cast<double>(message.TotalBytes()));
    }
    TF_RETURN_IF_ERROR(ledger->Decoded(drop));
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - started;
    ledger->Count(kDecodeSeconds, seconds.count());
    return absl::OkStatus();
  }

  absl::Status Decode(OpKernelContext* context, const Tensor& message, Tensor* sum,
                      bool* nonfinite) const {
    const hvdc_spec spec = SpecFor(sum->shape());
    const int64_t size = context->input(4).NumElements();
    if (message.NumElements() != ranks_ * size) {
      return errors::DataLoss(label_, ": expected ", ranks_, " times ", size, " bytes, got ",
                              message.NumElements());
    }
    const int64_t step = context->input(5).scalar<int64_t>()();
    const auto* payloads = message.flat<uint8_t>().data();
    for (int rank = 0; rank < ranks_; ++rank) {
      if (size > 0 && IsFailure(payloads + rank * size)) {
        return errors::DataLoss(
            label_, ": expected rank ", rank,
            "'s payload, got none: encoding failed there, with an error of its own");
      }
    }
    int32_t bad = -1;
    const int status = hvdc_decode_sum(&spec, step, payloads, size, size, ranks_, scale_,
                                       sum->data(), DtypeOf(sum->dtype()), 0, threads_, &bad);
    if (status != HVDC_OK) return Failure(status, bad, step);
    for (int rank = 0; rank < ranks_; ++rank) {
      hvdc::Header header;
      std::memcpy(&header, payloads + rank * size, sizeof(header));
      *nonfinite = *nonfinite || (header.flags & hvdc::kFlagNonfinite);
    }
    return absl::OkStatus();
  }

  // Whether zeros came in a payload's place, as in hvd_compress/exchange/shards.py.
  static bool IsFailure(const uint8_t* payload) {
    const hvdc::Header none{};
    return std::memcmp(payload, &none, sizeof(none)) == 0;
  }

  absl::Status Failure(int status, int32_t rank, int64_t step) const {
    switch (status) {
      case HVDC_BAD_HEADER:
        return errors::DataLoss(label_, ": expected rank ", rank,
                                "'s payload to be of the same codec, shape and step ", step,
                                ", got another header");
      case HVDC_BAD_CHECKSUM:
        return errors::DataLoss(label_, ": expected rank ", rank,
                                "'s payload as it was sent, got another checksum");
      default:
        return errors::Internal(label_, ": decoding failed with status ", status);
    }
  }

  absl::Status Scale(const Tensor& message, Tensor* sum) const {
    const int64_t count = sum->NumElements();
    if (message.NumElements() != count * static_cast<int64_t>(sizeof(float))) {
      return errors::DataLoss(label_, ": expected a sum of ", count, " float32 numbers, got ",
                              message.NumElements(), " bytes");
    }
    const auto* values = reinterpret_cast<const float*>(message.flat<uint8_t>().data());
    switch (sum->dtype()) {
      case DT_HALF:
        return ScaleInto(values, sum->flat<Eigen::half>());
      case DT_BFLOAT16:
        return ScaleInto(values, sum->flat<bfloat16>());
      default:
        return ScaleInto(values, sum->flat<float>());
    }
  }

  template <typename Flat>
  absl::Status ScaleInto(const float* values, Flat out) const {
    for (int64_t i = 0; i < out.size(); ++i) {
      out(i) = static_cast<typename Flat::Scalar>(values[i] * scale_);
    }
    return absl::OkStatus();
  }

  int ranks_;
  float scale_;
};
REGISTER_KERNEL_BUILDER(Name("HvdcDecode").Device(DEVICE_CPU), DecodeOp);

}  // namespace
}  // namespace hvd_compress
