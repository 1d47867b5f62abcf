#include "cpu_kernels.h"

#include <cstring>

#include "codec/layout.h"
#include "tensorflow/core/framework/numeric_types.h"
#include "tensorflow/core/platform/errors.h"

namespace hvd_compress {

using tensorflow::errors::DataLoss;
using tensorflow::errors::Internal;

namespace {

// Whether zeros came in a payload's place, as in hvd_compress/exchange/shards.py.
bool IsFailure(const uint8_t* payload) {
  const hvdc::Header none{};
  return std::memcmp(payload, &none, sizeof(none)) == 0;
}

bool IsNonfinite(const uint8_t* payload) {
  hvdc::Header header;
  std::memcpy(&header, payload, sizeof(header));
  return header.flags & hvdc::kFlagNonfinite;
}

template <typename T>
void ScaleInto(const float* values, int64_t count, float scale, T* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = static_cast<T>(values[i] * scale);
}

}  // namespace

absl::Status CpuKernels::Zero(void* memory, int64_t bytes) {
  if (bytes) std::memset(memory, 0, bytes);
  return absl::OkStatus();
}

absl::Status CpuKernels::Copy(void* to, const void* from, int64_t bytes) {
  if (bytes) std::memcpy(to, from, bytes);
  return absl::OkStatus();
}

absl::Status CpuKernels::Encode(const hvdc_spec& spec, const hvdc_noise& noise, const void* numbers,
                                int dtype, const hvdc_feedback* feedback, void* payload,
                                int64_t bytes) {
  const int status = hvdc_encode(&spec, &noise, numbers, dtype, feedback, payload, bytes, threads_);
  if (status == HVDC_OK) return absl::OkStatus();
  return Internal("encoding failed with status ", status);
}

absl::Status CpuKernels::DecodeSum(const Payloads& payloads, const Senders& senders, float scale,
                                   void* out, int dtype, bool* nonfinite) {
  for (int copy = 0; copy < payloads.count; ++copy) {
    if (IsFailure(payloads.first + copy * payloads.bytes)) {
      return DataLoss(
          senders.label, ": expected rank ", copy * senders.pieces + senders.piece,
          senders.owners ? "'s average, got none: decoding or " : "'s payload, got none: ",
          "encoding failed there, with an error of its own");
    }
  }
  int32_t bad = -1;
  const int status =
      hvdc_decode_sum(&payloads.spec, payloads.step, payloads.first, payloads.bytes, payloads.bytes,
                      payloads.count, scale, out, dtype, 0, threads_, &bad);
  if (status != HVDC_OK) return BadPayload(senders, status, bad);
  for (int copy = 0; copy < payloads.count; ++copy) {
    *nonfinite = *nonfinite || IsNonfinite(payloads.first + copy * payloads.bytes);
  }
  return absl::OkStatus();
}

absl::Status CpuKernels::TakeBack(const Payloads& payload, const Senders& sender,
                                  const void* numbers, int dtype, const hvdc_feedback& feedback,
                                  When when) {
  // The host has seen all flags: what has to be taken back is taken back at once.
  if (when == When::kIfFlagged) return absl::OkStatus();
  const int status = hvdc_take_back(&payload.spec, payload.step, numbers, dtype, &feedback,
                                    payload.first, payload.bytes, threads_);
  if (status == HVDC_OK) return absl::OkStatus();
  return Internal(sender.label, ": taking a residual back failed with status ", status);
}

absl::Status CpuKernels::Scale(const float* values, int64_t count, float scale, void* out,
                               int dtype) {
  switch (dtype) {
    case HVDC_DTYPE_FLOAT16:
      ScaleInto(values, count, scale, static_cast<Eigen::half*>(out));
      break;
    case HVDC_DTYPE_BFLOAT16:
      ScaleInto(values, count, scale, static_cast<tensorflow::bfloat16*>(out));
      break;
    default:
      ScaleInto(values, count, scale, static_cast<float*>(out));
  }
  return absl::OkStatus();
}

}  // namespace hvd_compress
