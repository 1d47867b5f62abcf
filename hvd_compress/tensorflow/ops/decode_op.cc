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
    const absl::Status status = Results(context, ledger, found->bucket.get(), encoded, &drop);
    if (!status.ok()) ledger->Fail(std::string(status.message()));
    for (Member& member : found->bucket->members) {
      member.status = status;
      member.gradient = Tensor();  // Moves keep it as long as it is needed.
    }
    ledger->Decoded(drop || !status.ok());
    if (!encoded) {
      ledger->Count(kReducedBytes, static_cast<double>(context->input(0).TotalBytes()));
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - started;
    ledger->Count(kDecodeSeconds, seconds.count());
    found->bucket->decoded->Set();
  }

 private:
  absl::Status Results(OpKernelContext* context, Ledger* ledger, Bucket* bucket, bool encoded,
                       bool* nonfinite) const {
    const std::string failure = ledger->failure();
    if (!failure.empty()) return errors::DataLoss(failure);
    const auto kernels = ledger->KernelsOn(context);
    TF_RETURN_IF_ERROR(kernels.status());
    const Tensor& message = context->input(0);
    const BucketLayout& layout = *bucket->layout;
    int64_t count = 0;
    Arrays arrays;
    for (Member& member : bucket->members) {
      TF_RETURN_IF_ERROR(
          context->allocate_temp(member.gradient.dtype(), member.gradient.shape(), &member.result));
      arrays.push_back({member.result.data(), nullptr, nullptr, static_cast<uint64_t>(member.step),
                        DtypeOf(member.result.dtype()), 0});
      count += member.result.NumElements();
    }
    const int64_t bytes = encoded ? copies_ * layout.message->bytes : 4 * count;
    if (encoded ? message.NumElements() != bytes : message.NumElements() < bytes) {
      return errors::DataLoss(layout.labels[0], ": expected a message of ", bytes, " bytes, got ",
                              message.NumElements());
    }
    if (!encoded) return Sums(kernels->get(), *bucket, message);
    TF_RETURN_IF_ERROR(
        kernels->get()->DecodeSum({bucket->layout, layout.message, averages_,
                                   message.flat<uint8_t>().data(), layout.message->bytes, copies_},
                                  arrays, static_cast<float>(layout.scale * weight_), nonfinite));
    for (const Member& member : bucket->members) {
      if (member.result.dtype() != DT_HALF) continue;
      // The sum may be beyond its range though no payload was: scalers of losses then skip the
      // step.
      TF_RETURN_IF_ERROR(kernels->get()->FlagNonfinite(member.result.data(),
                                                       member.result.NumElements(), nonfinite));
    }
    return absl::OkStatus();
  }

  static absl::Status Sums(Kernels* kernels, const Bucket& bucket, const Tensor& message) {
    const auto* from = static_cast<const float*>(message.data());
    for (const Member& member : bucket.members) {
      TF_RETURN_IF_ERROR(kernels->Scale(from, HVDC_DTYPE_FLOAT32, member.result.NumElements(),
                                        static_cast<float>(bucket.layout->scale),
                                        member.result.data(), DtypeOf(member.result.dtype())));
      from += member.result.NumElements();
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
