// Makes the results of a bucket's gradients: decodes and adds all ranks' payloads, the averages of
// owners, or levels, or takes the sums that went uncompressed.
#include <chrono>
#include <cmath>

#include "bucket.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/platform/errors.h"

namespace hvd_compress {
namespace {

using namespace tensorflow;  // NOLINT: the registration macros need it

// message: the received message or, where `encoded` is false, the float32 sums of the ranks'
// gradients. what: "payloads" of whole gradients, one message of each rank after the other;
// "averages" of each owner's pieces, with `copies` messages of each owner, one after the other;
// "levels", the norms that the ranks agreed on and the sum of their words. copies: the number of
// payloads of the same piece. weight: the number of ranks whose gradients each of these averages.
//
// It does not fail: an error is told by the results, which wait for the step's other gradients.
REGISTER_OP("HvdcDecode")
    .Input("message: uint8")
    .Input("encoded: bool")
    .Input("ledger: resource")
    .Attr("bucket: int")
    .Attr("what: {'payloads', 'averages', 'levels'}")
    .Attr("copies: int")
    .Attr("weight: int")
    .SetIsStateful()
    .SetShapeFn(shape_inference::NoOutputs);

class DecodeOp : public OpKernel {
 public:
  explicit DecodeOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("bucket", &bucket_));
    OP_REQUIRES_OK(context, context->GetAttr("what", &what_));
    OP_REQUIRES_OK(context, context->GetAttr("copies", &copies_));
    OP_REQUIRES_OK(context, context->GetAttr("weight", &weight_));
  }

  void Compute(OpKernelContext* context) override {
    const auto found = LookupBucket(context, 2, bucket_);
    OP_REQUIRES_OK(context, found.status());
    Ledger* const ledger = found->ledger.get();
    const bool encoded = context->input(1).scalar<bool>()();
    const auto started = std::chrono::steady_clock::now();
    bool drop = false;
    Numbers at{0, 0, 0};
    for (const Member& member : found->bucket->members) at.word += member.coder->norms();
    for (Member& member : found->bucket->members) {
      member.status = Result(context, ledger, *found->bucket, encoded, at, &member, &drop);
      if (!member.status.ok()) {
        ledger->Fail(std::string(member.status.message()));
        drop = true;
      }
      at.sum += member.gradient.NumElements();
      at.norm += member.coder->norms();
      at.word += member.coder->words() + Coder::kExtraWords;
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
  // The positions of a member's first numbers of 32 bits: uncompressed sums, norms, words.
  struct Numbers {
    int64_t sum, norm, word;
  };

  absl::Status Result(OpKernelContext* context, Ledger* ledger, const Bucket& bucket, bool encoded,
                      const Numbers& at, Member* member, bool* nonfinite) const {
    const std::string failure = ledger->failure();
    if (!failure.empty()) return errors::DataLoss(failure);
    const Tensor& message = context->input(0);
    const Tensor& gradient = member->gradient;
    TF_RETURN_IF_ERROR(context->allocate_temp(gradient.dtype(), gradient.shape(), &member->result));
    const auto kernels = KernelsFor(context, ledger, *member->coder);
    TF_RETURN_IF_ERROR(kernels.status());
    if (!encoded) return Sum(kernels->get(), message, at.sum, member);
    const float scale = static_cast<float>(member->scale * weight_);
    TF_RETURN_IF_ERROR(what_ == "levels"
                           ? Levels(bucket, message, at, scale, member, nonfinite)
                           : Payloads(kernels->get(), bucket, message, scale, member, nonfinite));
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
      TF_RETURN_IF_ERROR(kernels->DecodeSum(
          {piece.spec, member->step, first, piece.bytes, block.size, copies_},
          {label, i, member->pieces.size(), what_ == "averages", member->step}, scale,
          to + piece.begin * width, DtypeOf(member->result.dtype()), nonfinite));
    }
    return absl::OkStatus();
  }

  absl::Status Levels(const Bucket& bucket, const Tensor& message, const Numbers& at, float scale,
                      Member* member, bool* nonfinite) const {
    const Coder& coder = *member->coder;
    int64_t numbers = 0;
    for (const Member& one : bucket.members) {
      numbers += one.coder->norms() + one.coder->words() + Coder::kExtraWords;
    }
    if (message.NumElements() != 4 * numbers) {
      return errors::DataLoss(coder.label(), ": expected norms and levels of ", 4 * numbers,
                              " bytes, got ", message.NumElements());
    }
    const auto* norms = reinterpret_cast<const float*>(message.flat<uint8_t>().data()) + at.norm;
    const auto* words = reinterpret_cast<const int32_t*>(message.flat<uint8_t>().data()) + at.word;
    if (!coder.Agrees(norms, words)) {
      return errors::DataLoss(coder.label(),
                              ": expected levels and norms that agree with their "
                              "checks, got some that were altered in transit");
    }
    const int32_t counted = words[coder.words()];
    if (counted != copies_) {
      return errors::DataLoss(coder.label(), ": expected the levels of all ", copies_,
                              " ranks, got those of ", counted,
                              "; the own errors of the others say why");
    }
    for (int64_t i = 0; i < coder.norms(); ++i) *nonfinite = *nonfinite || std::isinf(norms[i]);
    return coder.DecodeLevels(norms, words, scale, &member->result);
  }

  int64_t bucket_;
  int copies_, weight_;
  std::string what_;
};
HVDC_REGISTER("HvdcDecode", DecodeOp, .HostMemory("encoded").HostMemory("ledger"));

}  // namespace
}  // namespace hvd_compress
