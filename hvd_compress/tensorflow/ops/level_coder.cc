#include "level_coder.h"

#include <utility>

#include "cpu_kernels.h"
#include "tensorflow/core/platform/errors.h"

namespace hvd_compress {

using namespace tensorflow;  // NOLINT: the macros need it

LevelCoder::LevelCoder(OpKernelConstruction* context) : GradientCodec(context) {
  OP_REQUIRES_OK(context, context->GetAttr("count", &count_));
  OP_REQUIRES_OK(context, context->GetAttr("buckets", &buckets_));
  OP_REQUIRES_OK(context, context->GetAttr("bits", &bits_));
  whole_ = SpecOf(TensorShape({count_}));
  words_ = hvdc_level_words(&whole_, bits_);
  OP_REQUIRES(context, words_ >= 0,
              errors::InvalidArgument(label(), ": expected a codec with levels that lanes of ",
                                      bits_, " bits hold"));
}

absl::Status LevelCoder::Norms(OpKernelContext* context, const Tensor& gradient, Var* residual,
                               float* norms) const {
  TF_RETURN_IF_ERROR(CheckTraced(count_, gradient));
  mutex_lock lock(*residual->mu());
  float* rest;
  CpuKernels kernels(threads());
  TF_RETURN_IF_ERROR(Prepare(context, &kernels, count_, residual, &rest));
  const hvdc_feedback feedback = FeedbackWith(rest);
  return Check(hvdc_level_norms(&whole_, gradient.data(), DtypeOf(gradient.dtype()),
                                rest ? &feedback : nullptr, norms, buckets_, threads()),
               "computing norms");
}

absl::Status LevelCoder::Encode(OpKernelContext* context, const hvdc_noise& noise,
                                const Tensor& gradient, const Tensor& norms, Var* residual,
                                int32_t* words) const {
  TF_RETURN_IF_ERROR(CheckTraced(count_, gradient));
  if (norms.NumElements() != buckets_) {
    return errors::DataLoss(label(), ": expected ", buckets_, " norms, got ", norms.NumElements());
  }
  mutex_lock lock(*residual->mu());
  float* rest;
  CpuKernels kernels(threads());
  TF_RETURN_IF_ERROR(Prepare(context, &kernels, count_, residual, &rest));
  const hvdc_feedback feedback = FeedbackWith(rest);
  return Check(
      hvdc_level_encode(&whole_, &noise, gradient.data(), DtypeOf(gradient.dtype()),
                        rest ? &feedback : nullptr, static_cast<const float*>(norms.data()), bits_,
                        words, words_, threads()),
      "encoding levels");
}

TakeBack LevelCoder::ToTakeBack(const Tensor& gradient, const Tensor& norms, const Tensor& words,
                                core::RefCountPtr<Var> residual) const {
  return [coder = *this, gradient, norms, words, residual = std::move(residual)](When when) {
    if (when == When::kIfFlagged) return absl::OkStatus();  // The host has seen all flags.
    mutex_lock lock(*residual->mu());
    const hvdc_feedback feedback = coder.FeedbackWith(residual->tensor()->flat<float>().data());
    return coder.Check(
        hvdc_level_take_back(&coder.whole_, gradient.data(), DtypeOf(gradient.dtype()), &feedback,
                             static_cast<const float*>(norms.data()), coder.bits_,
                             static_cast<const int32_t*>(words.data()), coder.words_,
                             coder.threads()),
        "taking a residual back");
  };
}

absl::Status LevelCoder::Decode(const float* norms, const int32_t* words, float scale,
                                Tensor* sum) const {
  TF_RETURN_IF_ERROR(CheckTraced(count_, *sum));
  return Check(hvdc_level_decode(&whole_, norms, bits_, words, words_, scale, sum->data(),
                                 DtypeOf(sum->dtype()), threads()),
               "decoding levels");
}

absl::Status LevelCoder::Check(int status, const char* what) const {
  if (status == HVDC_OK) return absl::OkStatus();
  return errors::Internal(label(), ": ", what, " failed with status ", status);
}

}  // namespace hvd_compress
