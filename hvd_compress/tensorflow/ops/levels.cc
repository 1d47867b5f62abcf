// The norms and levels of one gradient, for integer sums.
#include <utility>

#include "coder.h"
#include "cpu_kernels.h"
#include "tensorflow/core/platform/errors.h"

namespace hvd_compress {

using namespace tensorflow;  // NOLINT: the macros need it

absl::Status Coder::Norms(OpKernelContext* context, const Tensor& gradient, Var* residual,
                          float* norms) const {
  TF_RETURN_IF_ERROR(CheckTraced(gradient));
  mutex_lock lock(*residual->mu());
  float* rest;
  CpuKernels kernels(threads_);
  TF_RETURN_IF_ERROR(Prepare(context, &kernels, gradient.NumElements(), residual, &rest));
  const hvdc_feedback feedback = FeedbackWith(rest);
  return CheckLevels(hvdc_level_norms(&flat_, gradient.data(), DtypeOf(gradient.dtype()),
                                      rest ? &feedback : nullptr, norms, norms_, threads_),
                     "computing norms");
}

absl::Status Coder::EncodeLevels(OpKernelContext* context, int64_t step, const Tensor& gradient,
                                 const float* norms, Var* residual, int32_t* words) const {
  TF_RETURN_IF_ERROR(CheckTraced(gradient));
  mutex_lock lock(*residual->mu());
  float* rest;
  CpuKernels kernels(threads_);
  TF_RETURN_IF_ERROR(Prepare(context, &kernels, gradient.NumElements(), residual, &rest));
  const hvdc_feedback feedback = FeedbackWith(rest);
  const hvdc_noise noise = NoiseOf(streams_[0], step);
  return CheckLevels(
      hvdc_level_encode(&flat_, &noise, gradient.data(), DtypeOf(gradient.dtype()),
                        rest ? &feedback : nullptr, norms, bits_, words, words_, threads_),
      "encoding levels");
}

Rollback Coder::ToLevelRollback(const Tensor& gradient, const Tensor& all_norms, const float* norms,
                                const Tensor& all_words, const int32_t* words,
                                core::RefCountPtr<Var> residual) const {
  return [coder = *this, gradient, all_norms, norms, all_words, words,
          residual = std::move(residual)](When when) {
    if (when == When::kIfFlagged) return absl::OkStatus();  // The host has seen all flags.
    mutex_lock lock(*residual->mu());
    const hvdc_feedback feedback = coder.FeedbackWith(residual->tensor()->flat<float>().data());
    return coder.CheckLevels(
        hvdc_level_take_back(&coder.flat_, gradient.data(), DtypeOf(gradient.dtype()), &feedback,
                             norms, coder.bits_, words, coder.words_, coder.threads_),
        "rolling a residual back");
  };
}

absl::Status Coder::DecodeLevels(const float* norms, const int32_t* words, float scale,
                                 Tensor* sum) const {
  TF_RETURN_IF_ERROR(CheckTraced(*sum));
  return CheckLevels(hvdc_level_decode(&flat_, norms, bits_, words, words_, scale, sum->data(),
                                       DtypeOf(sum->dtype()), threads_),
                     "decoding levels");
}

absl::Status Coder::CheckLevels(int status, const char* what) const {
  if (status == HVDC_OK) return absl::OkStatus();
  return errors::Internal(label_, ": ", what, " failed with status ", status);
}

}  // namespace hvd_compress
