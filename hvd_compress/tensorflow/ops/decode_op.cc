// Makes the results of a bucket's gradients: decodes and adds all ranks' payloads, or the averages
// of owners, or takes the sums that went uncompressed.
#include <chrono>

#include "bucket.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/platform/errors.h"

namespace hvd_compress {
namespace {

using namespace tensorflow;  // NOLINT: the registration macros need it

// message: the received message or, where `encoded` is false, the float32 sums of the ranks'
// gradients. what: "payloads" of whole gradients, one message of each rank after the other, or
// "averages" of all ranks' pieces, one message of each owner after the other. ranks: their number.
//
// It does not fail: an error is told by the results, which wait for the step's other gradients.
REGISTER_OP("HvdcDecode")
    .Input("message: uint8")
    .Input("encoded: bool")
    .Input("ledger: resource")
    .Attr("bucket: int")
    .Attr("what: {'payloads', 'averages'}")
    .Attr("ranks: int")
    .SetIsStateful()
    .SetShapeFn(shape_inference::NoOutputs);

class DecodeOp : public OpKernel {
 public:
  explicit DecodeOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("bucket", &bucket_));
    std::string what;
    int ranks;
    OP_REQUIRES_OK(context, context->GetAttr("what", &what));
    OP_REQUIRES_OK(context, context->GetAttr("ranks", &ranks));
    averages_ = what == "averages";
    copies_ = averages_ ? 1 : ranks;
    weight_ = averages_ ? ranks : 1;
  }

  void Compute(OpKernelContext* context) override {
    const auto found = LookupBucket(context, 2, bucket_);
    OP_REQUIRES_OK(context, found.status());
    Ledger* const ledger = found->ledger.get();
    const bool encoded = context->input(1).scalar<bool>()();
    const auto started = std::chrono::steady_clock::now();
    bool drop = false;
    int64_t begin = 0;  // of a member's uncompressed sum
    for (Member& member : found->bucket->members) {
      member.status = Result(context, ledger, *found->bucket, encoded, begin, &member, &drop);
      if (!member.status.ok()) {
        ledger->Fail(std::string(member.status.message()));
        drop = true;
      }
      begin += member.gradient.NumElements();
      member.gradient = Tensor();  // Moves keep it as long as it is needed.
    }
    ledger->Decoded(drop);
    if (!encoded) {
      ledger->Count(kReducedBytes, static_cast<double>(context->input(0).TotalBytes()));
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - started;
    ledger->Count(kDecodeSeconds, seconds.count());
    found->bucket->decoded->Set();
  }

 private:
  absl::Status Result(OpKernelContext* context, Ledger* ledger, const Bucket& bucket, bool encoded,
                      int64_t begin, Member* member, bool* nonfinite) const {
    const std::string failure = ledger->failure();
    if (!failure.empty()) return errors::DataLoss(failure);
    const Tensor& message = context->input(0);
    const Tensor& gradient = member->gradient;
    TF_RETURN_IF_ERROR(context->allocate_temp(gradient.dtype(), gradient.shape(), &member->result));
    const auto kernels = KernelsFor(context, ledger, *member->coder);
    TF_RETURN_IF_ERROR(kernels.status());
    if (!encoded) return Sum(kernels->get(), message, begin, member);
    const float scale = static_cast<float>(member->scale * weight_);
    TF_RETURN_IF_ERROR(Payloads(kernels->get(), bucket, message, scale, member, nonfinite));
    if (gradient.dtype() != DT_HALF) return absl::OkStatus();
    // The sum may be beyond its range though no payload was: scalers of losses then skip the step.
    return kernels->get()->FlagNonfinite(member->result.data(), gradient.NumElements(), nonfinite);
  }

  static absl::Status Sum(Kernels* kernels, const Tensor& message, int64_t begin, Member* member) {
    const int64_t count = member->result.NumElements();
    if (message.NumElements() < 4 * (begin + count)) {
      return errors::DataLoss(member->coder->label(), ": expected a sum of ", begin + count,
                              " float32 numbers or more, got ", message.NumElements(), " bytes");
    }
    return kernels->Scale(static_cast<const float*>(message.data()) + begin, HVDC_DTYPE_FLOAT32,
                          count, static_cast<float>(member->scale), member->result.data(),
                          DtypeOf(member->result.dtype()));
  }

  absl::Status Payloads(Kernels* kernels, const Bucket& bucket, const Tensor& message, float scale,
                        Member* member, bool* nonfinite) const {
    const std::string& label = member->coder->label();
    const Bucket::Block last = bucket.blocks.back();
    const int64_t bytes = copies_ * (last.begin + last.size);
    if (message.NumElements() != bytes) {
      return errors::DataLoss(label, ": expected a message of ", bytes, " bytes, got ",
                              message.NumElements());
    }
    const auto* from = message.flat<uint8_t>().data();
    auto* to = static_cast<char*>(member->result.data());
    const int width = DataTypeSize(member->result.dtype());
    for (size_t i = 0; i < member->pieces.size(); ++i) {
      const Piece& piece = member->pieces[i];
      if (piece.bytes == 0) continue;
      const Bucket::Block block = bucket.blocks[i];
      const auto* first = from + copies_ * block.begin + (piece.offset - block.begin);
      TF_RETURN_IF_ERROR(
          kernels->DecodeSum({piece.spec, member->step, first, piece.bytes, block.size, copies_},
                             {label, i, averages_, member->step}, scale, to + piece.begin * width,
                             DtypeOf(member->result.dtype()), nonfinite));
    }
    return absl::OkStatus();
  }

  int64_t bucket_;
  bool averages_;
  int copies_;  // payloads of the same piece
  int weight_;  // ranks whose gradients each of them averages
};
HVDC_REGISTER("HvdcDecode", DecodeOp, .HostMemory("encoded").HostMemory("ledger"));

}  // namespace
}  // namespace hvd_compress
