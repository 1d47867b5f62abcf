// A libFuzzer target: any bytes as payloads of any configuration. Decoding may refuse them, but
// never read or write anything that is not its own; all buffers have their exact size, for
// AddressSanitizer.
#include <stdio.h>
#include <stdlib.h>

#include <memory>

#include "cases.h"

namespace {

using cases::Case;

enum Mode { kRaw, kSized, kHeader, kModes };  // how much of the input is put right

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

void DecodeOnce(const Case& test, const uint8_t* data, size_t size) {
  const int64_t right = hvdc_payload_bytes(&test.spec);
  DEMAND(right >= 32 && right % 16 == 0);
  const Mode mode = static_cast<Mode>(test.mode % kModes);
  const int count = mode == kRaw ? 1 : test.count;
  const int64_t bytes = mode == kRaw ? static_cast<int64_t>(size) : right;
  const auto payloads = Fill(data, size, bytes * count);
  if (mode == kHeader) {
    for (int k = 0; k < count; ++k) {
      cases::WriteHeader(test.spec, payloads.get() + k * bytes, bytes);
    }
  }
  const int64_t elements = test.spec.rows * test.spec.columns;
  const int64_t width = test.dtype == HVDC_DTYPE_FLOAT32 ? 4 : 2;
  const auto out = Fill(data, size, elements * width);
  int32_t bad = -2;
  const int status =
      hvdc_decode_sum(&test.spec, cases::kStep, payloads.get(), bytes, bytes, count, 0.5f,
                      out.get(), test.dtype, test.accumulate, test.threads, &bad);
  DEMAND(bad >= -1 && bad < count);
  if (mode == kRaw && bytes != right) DEMAND(status == HVDC_BAD_SIZE);
  if (mode == kHeader) DEMAND(status == HVDC_OK);
  const auto residual = Fill(data, size, elements * 4);
  const hvdc_feedback feedback = {1.0f, 1.0f, reinterpret_cast<float*>(residual.get())};
  const int taken = hvdc_take_back(&test.spec, cases::kStep, out.get(), test.dtype, &feedback,
                                   payloads.get(), bytes, test.threads);
  if (count == 1) DEMAND(taken == status);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < cases::kSpecBytes) return 0;
  Case test = cases::MakeCase(data);
  if (hvdc_set_isa(test.isa) != HVDC_OK) return 0;
  if (data[15] == 255) {
    // Also specs that no codec has.
    if (size >= 2 * cases::kSpecBytes) memcpy(&test.spec, data + 16, 16);
    if (hvdc_payload_bytes(&test.spec) < 0) {
      int32_t bad;
      DEMAND(hvdc_decode_sum(&test.spec, 0, nullptr, 0, 0, 0, 1.0f, nullptr, 0, 0, 1, &bad) ==
             HVDC_BAD_SPEC);
      return 0;
    }
  }
  DecodeOnce(test, data + cases::kSpecBytes, size - cases::kSpecBytes);
  return 0;
}
