// The norms and levels of one gradient, for integer sums.
#include <algorithm>
#include <cstring>
#include <utility>

#include "coder.h"
#include "cpu_kernels.h"
#include "tensorflow/core/platform/errors.h"

namespace hvd_compress {

using namespace tensorflow;  // NOLINT: the macros need it

namespace {

constexpr int64_t kModulus = 4194301;  // The sum of 512 ranks' checks fits into a word.
constexpr int64_t kColumns = 64;

int64_t Remainder(int64_t number) { return ((number % kModulus) + kModulus) % kModulus; }

// The check of numbers of 32 bits.
int64_t CheckOfNumbers(const void* numbers, int64_t count) {
  const auto* from = static_cast<const char*>(numbers);
  int32_t row[kColumns];
  int64_t columns[kColumns] = {};
  for (int64_t i = 0; i < count; i += kColumns) {
    const int64_t length = std::min(kColumns, count - i);
    std::memcpy(row, from + 4 * i, 4 * length);
    if (length < kColumns) std::fill(row + length, row + kColumns, 0);
    for (int64_t j = 0; j < kColumns; ++j) columns[j] += row[j];
  }
  int64_t factor = 1, check = 0;
  for (const int64_t column : columns) {
    check = (check + factor * Remainder(column)) % kModulus;
    factor = 3 * factor % kModulus;
  }
  return check;
}

}  // namespace

int32_t Coder::CheckOf(const float* norms, const int32_t* words) const {
  const int64_t levels = CheckOfNumbers(words, words_ + 1);
  const int64_t counted = Remainder(words[words_]);
  return static_cast<int32_t>((levels + counted * CheckOfNumbers(norms, norms_)) % kModulus);
}

bool Coder::Agrees(const float* norms, const int32_t* words) const {
  return Remainder(words[words_ + 1]) == CheckOf(norms, words);
}

absl::Status Coder::Norms(OpKernelContext* context, const Tensor& gradient, Var* residual,
                          float* norms) const {
  TF_RETURN_IF_ERROR(CheckTraced(gradient));
  mutex_lock lock(*residual->mu());
  Tensor now;
  hvdc_tensor tensor = LevelTensor(gradient, 0, 0);
  if (feedback()) {
    CpuKernels kernels(threads_);
    TF_RETURN_IF_ERROR(Current(context, &kernels, gradient.NumElements(), residual, &now));
    tensor.residual = tensor.next_residual = now.data();  // Only read.
    tensor.residual_dtype = DtypeOf(now.dtype());
  }
  return CheckLevels(hvdc_level_norms_batch(&tensor, 1, norms, threads_, nullptr),
                     "computing norms");
}

absl::Status Coder::EncodeLevels(OpKernelContext* context, int64_t number, int64_t step,
                                 const Tensor& gradient, const float* norms, Var* residual,
                                 int32_t* words, Tensor* before) const {
  TF_RETURN_IF_ERROR(CheckTraced(gradient));
  mutex_lock lock(*residual->mu());
  Tensor next;
  hvdc_tensor tensor = LevelTensor(gradient, number, step);
  if (feedback()) {
    CpuKernels kernels(threads_);
    TF_RETURN_IF_ERROR(Current(context, &kernels, gradient.NumElements(), residual, before));
    TF_RETURN_IF_ERROR(context->allocate_temp(before->dtype(), before->shape(), &next));
    tensor.residual = before->data();
    tensor.next_residual = next.data();
    tensor.residual_dtype = DtypeOf(next.dtype());
  }
  TF_RETURN_IF_ERROR(CheckLevels(
      hvdc_level_encode_batch(&tensor, 1, norms, words, threads_, nullptr), "encoding levels"));
  if (feedback()) *residual->tensor() = next;
  return absl::OkStatus();
}

absl::Status Coder::DecodeLevels(const float* norms, const int32_t* words, float scale,
                                 Tensor* sum) const {
  TF_RETURN_IF_ERROR(CheckTraced(*sum));
  hvdc_tensor tensor = LevelTensor(*sum, 0, 0);
  return CheckLevels(hvdc_level_decode_batch(&tensor, 1, norms, words, scale, threads_, nullptr),
                     "decoding levels");
}

hvdc_tensor Coder::LevelTensor(const Tensor& values, int64_t number, int64_t step) const {
  hvdc_tensor tensor = {};
  tensor.spec = flat_;
  tensor.noise = NoiseOf(streams_[0], number, step);
  tensor.values = values.data();
  tensor.dtype = DtypeOf(values.dtype());
  tensor.alpha = alpha_;
  tensor.beta = beta_;
  tensor.bits = bits_;
  tensor.norm_count = norms_;
  tensor.payload_bytes = 4 * words_;
  return tensor;
}

absl::Status Coder::CheckLevels(int status, const char* what) const {
  if (status == HVDC_OK) return absl::OkStatus();
  return errors::Internal(label_, ": ", what, " failed with status ", status);
}

}  // namespace hvd_compress
