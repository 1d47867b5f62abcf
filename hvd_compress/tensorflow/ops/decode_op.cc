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

class DecodeOp : public CodecOp {
 public:
  explicit DecodeOp(OpKernelConstruction* context) : CodecOp(context) {
    OP_REQUIRES_OK(context, context->GetAttr("ranks", &ranks_));
    OP_REQUIRES_OK(context, context->GetAttr("scale", &scale_));
  }

  void Compute(OpKernelContext* context) override {
    core::RefCountPtr<Ledger> ledger;
    OP_REQUIRES_OK(context, Lookup(context, 6, &ledger));
    const Tensor& message = context->input(0);
    const bool gathered = context->input(1).scalar<bool>()();
    const Tensor& gradient = context->input(3);
    Tensor* sum;
    OP_REQUIRES_OK(context, context->allocate_output(0, gradient.shape(), &sum));
    const auto started = std::chrono::steady_clock::now();
    bool drop = !gathered;
    if (gathered) {
      OP_REQUIRES_OK(context, Decode(context, message, sum, &drop));
    } else {
      OP_REQUIRES_OK(context, Scale(message, sum));
      ledger->Count(kDenseBytes, static_cast<double>(message.TotalBytes()));
    }
    OP_REQUIRES_OK(context, ledger->Decoded(drop));
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - started;
    ledger->Count(kDecodeSeconds, seconds.count());
  }

 private:
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
