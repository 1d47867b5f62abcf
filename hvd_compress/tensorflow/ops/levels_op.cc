// An integer sum's second message: levels with the norms that the ranks agreed on.
#include <algorithm>
#include <chrono>
#include <utility>

#include "bucket.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/platform/errors.h"

namespace hvd_compress {
namespace {

using namespace tensorflow;  // NOLINT: the registration macros need it

// norms: the largest of all ranks. words: each member's levels, a word in which every rank counts
// itself, and a check. It does not fail, because the other ranks wait for levels: a rank that has
// failed, or whose own norms are larger, sends zeros, which add nothing, and does not count itself.
REGISTER_OP("HvdcLevels")
    .Input("norms: float")
    .Input("ledger: resource")
    .Output("words: int32")
    .Attr("bucket: int")
    .SetIsStateful()
    .SetShapeFn([](shape_inference::InferenceContext* c) {
      c->set_output(0, c->Vector(shape_inference::InferenceContext::kUnknownDim));
      return absl::OkStatus();
    });

class LevelsOp : public OpKernel {
 public:
  explicit LevelsOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("bucket", &bucket_));
  }

  void Compute(OpKernelContext* context) override {
    const auto found = LookupBucket(context, 1, bucket_);
    OP_REQUIRES_OK(context, found.status());
    Ledger* const ledger = found->ledger.get();
    int64_t norms = 0, count = 0;
    for (const Member& member : found->bucket->members) {
      norms += member.coder->norms();
      count += member.coder->words() + Coder::kExtraWords;
    }
    const Tensor& agreed = context->input(0);
    OP_REQUIRES(context, agreed.NumElements() == norms,
                errors::DataLoss("expected ", norms, " norms, got ", agreed.NumElements()));
    Tensor* words;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({count}), &words));
    words->flat<int32_t>().setZero();
    ledger->Count(kReducedBytes, static_cast<double>(agreed.TotalBytes() + words->TotalBytes()));
    const auto started = std::chrono::steady_clock::now();
    const float* norm = agreed.flat<float>().data();
    int32_t* to = words->flat<int32_t>().data();
    for (Member& member : found->bucket->members) {
      const Coder& coder = *member.coder;
      if (ledger->failure().empty()) Encode(context, ledger, norm, &member, to);
      norm += coder.norms();
      to += coder.words() + Coder::kExtraWords;
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - started;
    ledger->Count(kEncodeSeconds, seconds.count());
  }

 private:
  static void Encode(OpKernelContext* context, Ledger* ledger, const float* norms, Member* member,
                     int32_t* to) {
    const Coder& coder = *member->coder;
    for (size_t i = 0; i < member->norms.size(); ++i) {
      if (!(norms[i] >= member->norms[i])) {  // Also where it is a NaN.
        ledger->Fail(coder.label() +
                     ": expected the ranks' largest norms, got some that were altered "
                     "in transit");
        return;
      }
    }
    Tensor before;
    const absl::Status status =
        coder.EncodeLevels(context, member->number, member->step, member->gradient, norms,
                           member->residual.get(), to, &before);
    if (!status.ok()) {
      ledger->Fail(std::string(status.message()));
      std::fill_n(to, coder.words(), 0);
      return;
    }
    to[coder.words()] = 1;
    to[coder.words() + 1] = coder.CheckOf(norms, to);
    ledger->Count(kElements, static_cast<double>(member->gradient.NumElements()));
    if (coder.feedback()) ledger->Encoded({std::move(member->residual), before, nullptr});
  }

  int64_t bucket_;
};
REGISTER_KERNEL_BUILDER(Name("HvdcLevels").Device(DEVICE_CPU), LevelsOp);

}  // namespace
}  // namespace hvd_compress
