#include "cpu_kernels.h"

#include <cstring>

#include "codec/layout.h"
#include "tensorflow/core/framework/numeric_types.h"
#include "tensorflow/core/platform/errors.h"

namespace hvd_compress {

using tensorflow::errors::DataLoss;
using tensorflow::errors::Internal;

namespace {

// Whether zeros came in a payload's place, as in hvd_compress/exchanges/shards.py.
bool IsFailure(const uint8_t* payload) {
  const hvdc::Header none{};
  return std::memcmp(payload, &none, sizeof(none)) == 0;
}

// Converts to float32, or from it.
template <typename From, typename To>
void ScaleInto(const void* numbers, int64_t count, float scale, void* out) {
  const auto* from = static_cast<const From*>(numbers);
  auto* to = static_cast<To*>(out);
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<To>(static_cast<float>(from[i]) * scale);
}

}  // namespace

absl::Status CpuKernels::Zero(void* memory, int64_t bytes) {
  if (bytes) std::memset(memory, 0, bytes);
  return absl::OkStatus();
}

absl::Status CpuKernels::Encode(const hvdc_spec& spec, const hvdc_noise& noise, const void* numbers,
                                int dtype, const Feedback* feedback, void* payload, int64_t bytes) {
  hvdc_tensor tensor = {};
  tensor.spec = spec;
  tensor.noise = noise;
  tensor.values = const_cast<void*>(numbers);
  tensor.dtype = dtype;
  tensor.payload_bytes = bytes;
  if (feedback) {
    tensor.residual = feedback->residual;
    tensor.next_residual = feedback->next;
    tensor.residual_dtype = feedback->residual_dtype;
    tensor.alpha = feedback->alpha;
    tensor.beta = feedback->beta;
  }
  const int status = FunctionsOf(spec).encode_batch(&tensor, 1, payload, threads_, nullptr);
  if (status == HVDC_OK) return absl::OkStatus();
  return Internal("encoding failed with status ", status);
}

absl::Status CpuKernels::DecodeSum(const Payloads& payloads, const Senders& senders, float scale,
                                   void* out, int dtype, bool* nonfinite) {
  for (int copy = 0; copy < payloads.count; ++copy) {
    if (IsFailure(payloads.first + copy * payloads.stride)) {
      return DataLoss(
          senders.label, ": expected rank ", senders.first + copy,
          senders.owners ? "'s average, got none: decoding or " : "'s payload, got none: ",
          "encoding failed there, with an error of its own");
    }
  }
  hvdc_tensor tensor = {};
  tensor.spec = payloads.spec;
  tensor.noise.step = payloads.step;
  tensor.values = out;
  tensor.dtype = dtype;
  tensor.payload_bytes = payloads.bytes;
  int32_t bad = -1;
  const int status = FunctionsOf(payloads.spec)
                         .decode_batch(&tensor, 1, payloads.first, payloads.stride, payloads.count,
                                       scale, threads_, nullptr, &bad);
  if (status != HVDC_OK) return BadPayload(senders, status, bad);
  *nonfinite = *nonfinite || tensor.flags;
  return absl::OkStatus();
}

absl::Status CpuKernels::FlagNonfinite(const void* halves, int64_t count, bool* nonfinite) {
  constexpr uint16_t kExponent = 0x7c00;
  const auto* const bits = static_cast<const uint16_t*>(halves);
  bool found = false;
  for (int64_t i = 0; i < count; ++i) found |= (bits[i] & kExponent) == kExponent;
  *nonfinite = *nonfinite || found;
  return absl::OkStatus();
}

absl::Status CpuKernels::Scale(const void* numbers, int from, int64_t count, float scale, void* out,
                               int to) {
  const int other = from == HVDC_DTYPE_FLOAT32 ? to : from;
  if (other == HVDC_DTYPE_FLOAT16) {
    (other == to ? ScaleInto<float, Eigen::half> : ScaleInto<Eigen::half, float>)(numbers, count,
                                                                                  scale, out);
  } else if (other == HVDC_DTYPE_BFLOAT16) {
    (other == to ? ScaleInto<float, tensorflow::bfloat16>
                 : ScaleInto<tensorflow::bfloat16, float>)(numbers, count, scale, out);
  } else {
    ScaleInto<float, float>(numbers, count, scale, out);
  }
  return absl::OkStatus();
}

}  // namespace hvd_compress
