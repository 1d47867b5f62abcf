// A libFuzzer target: any bytes as payloads of any configuration, or as a gradient. Decoding may
// refuse payloads, but never read or write anything that is not its own; what was encoded decodes.
// All buffers have their exact size, for AddressSanitizer.
#include <stdio.h>
#include <stdlib.h>

#include <memory>

#include "cases.h"

namespace {

using cases::Case;

// The part of a payload that is put right; or the input is a gradient.
enum Mode { kRaw, kSized, kHeader, kGradient, kModes };

#define DEMAND(condition)                                             \
  do {                                                                \
    if (!(condition)) {                                               \
      fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      abort();                                                        \
    }                                                                 \
  } while (0)

// Exactly that many bytes, aligned to 16, filled from data over and over.
std::unique_ptr<uint8_t[]> Fill(const uint8_t* data, size_t size, int64_t bytes) {
  std::unique_ptr<uint8_t[]> filled(new uint8_t[static_cast<size_t>(bytes)]);
  for (int64_t i = 0; i < bytes; ++i) {
    filled[static_cast<size_t>(i)] = size ? data[static_cast<size_t>(i) % size] : 0;
  }
  return filled;
}

// Some payloads of tensors whose codes may be entropy coded are plain ones.
void WriteHeader(const Case& test, uint8_t* payload, int64_t bytes) {
  if (test.spec.coding && payload[17] % 4)
    return cases::WriteCodedHeader(test.spec, payload, bytes);
  cases::WriteHeader(test.spec, payload, bytes);
}

// Messages of two payloads each, of which the second one has other bytes than the first.
void DecodeBatch(const Case& test, const uint8_t* data, size_t size, int64_t bytes, Mode mode) {
  const int64_t stride = 2 * bytes;
  const auto messages = Fill(data, size, stride * test.count);
  if (mode == kHeader) {
    for (int k = 0; k < 2 * test.count; ++k) {
      WriteHeader(test, messages.get() + k * bytes, bytes);
    }
  }
  const int64_t width = test.dtype == HVDC_DTYPE_FLOAT32 ? 4 : 2;
  const int64_t out_bytes = test.spec.rows * test.spec.columns * width;
  const std::unique_ptr<uint8_t[]> outs[] = {Fill(data, size, out_bytes),
                                             Fill(data, size, out_bytes)};
  hvdc_tensor tensors[2] = {};
  for (int i = 0; i < 2; ++i) {
    tensors[i].spec = test.spec;
    tensors[i].noise.step = cases::kStep;
    tensors[i].values = outs[i].get();
    tensors[i].dtype = test.dtype;
    tensors[i].offset = i * bytes;
    tensors[i].payload_bytes = bytes;
  }
  int64_t bad = -2;
  int32_t rank = -2;
  const int status = hvdc_decode_batch(tensors, 2, messages.get(), stride, test.count, 0.5f,
                                       test.threads, &bad, &rank);
  DEMAND(bad >= -1 && bad < 2 && rank >= -1 && rank < test.count);
  DEMAND((status == HVDC_OK) == (bad == -1));
  if (bytes != hvdc_payload_bytes(&test.spec)) DEMAND(status == HVDC_BAD_SIZE && bad == 0);
  if (mode == kHeader) DEMAND(status == HVDC_OK || (test.spec.coding && status == HVDC_BAD_CODES));
  if (status != HVDC_OK) return;
  const auto out = Fill(data, size, out_bytes);
  for (int i = 0; i < 2; ++i) {
    DEMAND(hvdc_decode_sum(&test.spec, cases::kStep, messages.get() + i * bytes, bytes, stride,
                           test.count, 0.5f, out.get(), test.dtype, 1, &rank) == HVDC_OK);
    DEMAND(!memcmp(out.get(), outs[i].get(), static_cast<size_t>(out_bytes)));
  }
}

void DecodeOnce(const Case& test, const uint8_t* data, size_t size) {
  const int64_t right = hvdc_payload_bytes(&test.spec);
  DEMAND(right >= 32 && right % 16 == 0);
  const Mode mode = static_cast<Mode>(test.mode % kModes);
  const int count = mode == kRaw ? 1 : test.count;
  const int64_t bytes = mode == kRaw ? static_cast<int64_t>(size) : right;
  const auto payloads = Fill(data, size, bytes * count);
  if (mode == kHeader) {
    for (int k = 0; k < count; ++k) {
      WriteHeader(test, payloads.get() + k * bytes, bytes);
    }
  }
  const int64_t elements = test.spec.rows * test.spec.columns;
  const int64_t width = test.dtype == HVDC_DTYPE_FLOAT32 ? 4 : 2;
  const auto out = Fill(data, size, elements * width);
  int32_t bad = -2;
  const int status = hvdc_decode_sum(&test.spec, cases::kStep, payloads.get(), bytes, bytes, count,
                                     0.5f, out.get(), test.dtype, test.threads, &bad);
  DEMAND(bad >= -1 && bad < count);
  if (mode == kRaw && bytes != right) DEMAND(status == HVDC_BAD_SIZE);
  if (mode == kHeader) DEMAND(status == HVDC_OK || (test.spec.coding && status == HVDC_BAD_CODES));
  DecodeBatch(test, data, size, bytes, mode);
}

// There and back. Threads change no byte of the payload, and what stands behind it does not matter.
void EncodeOnce(const Case& test, const uint8_t* data, size_t size) {
  const int64_t elements = test.spec.rows * test.spec.columns;
  const int64_t width = test.dtype == HVDC_DTYPE_FLOAT32 ? 4 : 2;
  const int64_t bytes = hvdc_payload_bytes(&test.spec);
  const auto gradient = Fill(data, size, elements * width);
  const hvdc_noise noise = {7, 1, 42, 0, cases::kStep};
  std::unique_ptr<uint8_t[]> payloads[2], residuals[2];
  for (int i = 0; i < 2; ++i) {
    payloads[i] = Fill(data, size, bytes);
    residuals[i] = Fill(data, size, elements * 4);
    DEMAND(hvdc_encode(&test.spec, &noise, gradient.get(), test.dtype,
                       test.feedback ? residuals[i].get() : nullptr, payloads[i].get(), bytes,
                       i ? test.threads : 1) == HVDC_OK);
  }
  const int64_t length = cases::PayloadLength(test.spec, payloads[0].get(), bytes);
  DEMAND(length >= 32 && length <= bytes);
  DEMAND(!memcmp(payloads[0].get(), payloads[1].get(), static_cast<size_t>(length)));
  DEMAND(!memcmp(residuals[0].get(), residuals[1].get(), static_cast<size_t>(elements * 4)));
  memset(payloads[1].get() + length, 0xFF, static_cast<size_t>(bytes - length));
  std::unique_ptr<uint8_t[]> outs[2];
  for (int i = 0; i < 2; ++i) {
    outs[i] = Fill(data, size, elements * width);
    int32_t bad;
    DEMAND(hvdc_decode_sum(&test.spec, cases::kStep, payloads[i].get(), bytes, bytes, 1, 0.5f,
                           outs[i].get(), test.dtype, test.threads, &bad) == HVDC_OK);
  }
  DEMAND(!memcmp(outs[0].get(), outs[1].get(), static_cast<size_t>(elements * width)));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < cases::kSpecBytes) return 0;
  Case test = cases::MakeCase(data);
  if (hvdc_set_isa(test.isa) != HVDC_OK) return 0;
  if (data[15] == 255) {
    // Some specs belong to no codec.
    if (size >= 2 * cases::kSpecBytes) memcpy(&test.spec, data + 16, 16);
    if (hvdc_payload_bytes(&test.spec) < 0) {
      int32_t bad;
      DEMAND(hvdc_decode_sum(&test.spec, 0, nullptr, 0, 0, 0, 1.0f, nullptr, 0, 1, &bad) ==
             HVDC_BAD_SPEC);
      return 0;
    }
  }
  const uint8_t* const rest = data + cases::kSpecBytes;
  const auto once = test.mode % kModes == kGradient ? EncodeOnce : DecodeOnce;
  once(test, rest, size - cases::kSpecBytes);
  return 0;
}
