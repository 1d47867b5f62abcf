// A configuration and a shape from a few bytes, so that a fuzzer can choose them, and a payload's
// header for it.
#ifndef HVDC_TESTS_NATIVE_CASES_H_
#define HVDC_TESTS_NATIVE_CASES_H_

#include <stdint.h>
#include <string.h>

#include "hvdc.h"

namespace cases {

constexpr int kSpecBytes = 16;  // that a case is made from
constexpr uint32_t kConfigHash = 0x12345678;
constexpr uint64_t kStep = 0x900000007;

struct Case {
  hvdc_spec spec;
  uint8_t mode;  // what the test does with it
  int dtype;
  int threads;
  int count;  // payloads
  bool accumulate;
  const char* isa;
};

inline Case MakeCase(const uint8_t* bytes) {
  static const float kFactors[] = {0.0f, 2.5f, 10.0f, 1e-20f, 1e20f, 0.1f};
  static const char* const kIsas[] = {"plain", "avx2", "avx512"};
  Case all = {};
  hvdc_spec& spec = all.spec;
  spec.codec = 1 + bytes[0] % 7;
  spec.config_hash = kConfigHash;
  spec.variant = bytes[1] % (spec.codec == HVDC_INT8 ? 4 : 2);
  spec.grouping = bytes[2] % (spec.codec == HVDC_ONEBIT ? 4 : 2);
  spec.group = 64u * (1 + bytes[3] % 48);
  if (bytes[3] == 255) spec.group = 65536;
  spec.levels = 1 + bytes[4] % 127;
  spec.factor = kFactors[bytes[5] % 6];
  if (spec.codec == HVDC_INT8 && spec.factor == 0) spec.factor = 1;
  // Shapes of all proportions with at most some ten thousand elements.
  spec.rows = bytes[6] + 256 * (bytes[7] % 40);
  spec.columns = bytes[8] + 256 * (bytes[9] % 40);
  if (bytes[10] % 2) spec.rows %= 9;
  if (spec.rows * spec.columns > 20000) {
    (bytes[10] & 2 ? spec.columns : spec.rows) %= 9;
  }
  all.dtype = bytes[11] % 3;
  all.accumulate = bytes[11] & 4;
  all.threads = 1 + bytes[12] % 4;
  all.count = 1 + bytes[12] / 4 % 3;
  all.mode = bytes[13];
  all.isa = kIsas[bytes[14] % 3];
  return all;
}

// The checksum as docs/format.md has it, written once more: word * (2 i + 1).
inline uint64_t SlowChecksum(const uint8_t* payload, int64_t bytes) {
  uint64_t total = 0;
  for (int64_t i = 0; i < bytes / 4; ++i) {
    uint32_t word;
    memcpy(&word, payload + 4 * i, 4);
    if (i != 6 && i != 7) total += static_cast<uint64_t>(word) * static_cast<uint64_t>(2 * i + 1);
  }
  return total;
}

inline void WriteChecksum(uint8_t* payload, int64_t bytes) {
  const uint64_t total = SlowChecksum(payload, bytes);
  memcpy(payload + 24, &total, 8);
}

// A header that the decoder accepts, so that it goes on to the body.
inline void WriteHeader(const hvdc_spec& spec, uint8_t* payload, int64_t bytes) {
  const uint16_t magic = 0x4348;
  const uint64_t count = static_cast<uint64_t>(spec.rows * spec.columns);
  const uint32_t flags = 0, step = static_cast<uint32_t>(kStep);
  memcpy(payload, &magic, 2);
  payload[2] = 1;
  payload[3] = static_cast<uint8_t>(spec.codec);
  memcpy(payload + 4, &spec.config_hash, 4);
  memcpy(payload + 8, &count, 8);
  memcpy(payload + 16, &flags, 4);
  memcpy(payload + 20, &step, 4);
  WriteChecksum(payload, bytes);
}

}  // namespace cases

#endif  // HVDC_TESTS_NATIVE_CASES_H_
