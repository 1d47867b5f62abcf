// A configuration and a shape from a few bytes, so that a fuzzer can choose them, and a payload's
// header for it.
#ifndef HVDC_TESTS_NATIVE_CASES_H_
#define HVDC_TESTS_NATIVE_CASES_H_

#include <stdint.h>
#include <string.h>

#include "hvdc.h"
#include "single.h"

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
  bool feedback;
  const char* isa;
};

inline Case MakeCase(const uint8_t* bytes) {
  static const float kFactors[] = {0.0f, 2.5f, 10.0f, 1e-20f, 1e20f, 0.1f};
  static const char* const kIsas[] = {"plain", "avx2", "avx512"};
  Case all = {};
  hvdc_spec& spec = all.spec;
  spec.codec = 1 + bytes[0] % 7;
  spec.config_hash = kConfigHash;
  static const uint32_t kVariants[] = {1, 6, 1, 3, 1, 2, 1};
  spec.variant = bytes[1] % kVariants[spec.codec - 1];
  spec.grouping = bytes[2] % (spec.codec == HVDC_ONEBIT ? 4 : 2);
  spec.group = 64u * (1 + bytes[3] % 48);
  if (bytes[3] == 255) spec.group = 65536;
  if (spec.codec == HVDC_ECQ && spec.variant == HVDC_ROTATED_LINF) {
    spec.grouping = HVDC_CONTIGUOUS;
    spec.group = 64u << bytes[3] % 11;
  }
  spec.levels = 1 + bytes[4] % 127;
  spec.factor = kFactors[bytes[5] % 6];
  if (spec.codec == HVDC_INT8 && spec.factor == 0) spec.factor = 1;
  // Shapes of all proportions with at most some ten thousand elements.
  spec.rows = bytes[6] + 256 * (bytes[7] % 40);
  spec.columns = bytes[8] + 256 * (bytes[9] % 40);
  if (bytes[10] % 2) spec.rows %= 9;
  const bool levels = spec.codec == HVDC_TERNARY || spec.codec == HVDC_ECQ;
  if (levels && bytes[13] >= 128) spec.coding = HVDC_ENTROPY;
  if (spec.rows * spec.columns > 20000) {
    (bytes[10] & 2 ? spec.columns : spec.rows) %= 9;
  }
  if (spec.coding && bytes[15] % 16 == 7) {  // several chunks, and from 131,072 on two of one size
    spec.rows = 65000 + 512 * bytes[6];
    spec.columns = 1;
  }
  all.dtype = bytes[11] % 3;
  all.feedback = bytes[11] & 4;
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

// The bytes that a payload occupies by its flags, where they are possible.
inline int64_t PayloadLength(const hvdc_spec& spec, const uint8_t* payload, int64_t bytes) {
  uint32_t flags;
  memcpy(&flags, payload + 16, 4);
  return spec.coding && flags & 2 ? int64_t{flags >> 4} * 16 : bytes;
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

// The same of an entropy-coded payload. Length, table and index follow from what stands there, and
// are possible, if they have room; the states and words are any.
inline void WriteCodedHeader(const hvdc_spec& spec, uint8_t* payload, int64_t bytes) {
  const int64_t count = spec.rows * spec.columns;
  const int64_t block = spec.grouping == HVDC_CONTIGUOUS ? spec.group : 2560;
  const int64_t scales = spec.grouping == HVDC_CONTIGUOUS ? (count + block - 1) / block : 1;
  const int64_t chunk = 65536 / block * block, chunks = (count + chunk - 1) / chunk;
  const int64_t codes = 32 + (4 * scales + 15) / 16 * 16;
  const int64_t alphabet = spec.codec == HVDC_TERNARY ? 3 : 2 * spec.levels + 1;
  const int64_t head = codes + (2 * alphabet + 3) / 4 * 4 + 4 * (chunks - 1);
  uint32_t any;
  memcpy(&any, payload + 16, 4);
  const int64_t units = count ? 2 + any % (bytes / 16 - 1) : 2;
  WriteHeader(spec, payload, bytes);
  if (count) {
    const uint32_t flags = 2 | static_cast<uint32_t>(units) << 4;
    memcpy(payload + 16, &flags, 4);
    if (16 * units >= head + 64 * chunks) {
      uint32_t left = 1 << 14;
      for (int64_t c = 0; c < alphabet; ++c) {
        uint16_t frequency;
        memcpy(&frequency, payload + codes + 2 * c, 2);
        frequency = static_cast<uint16_t>(c + 1 < alphabet ? frequency % (left + 1) : left);
        left -= frequency;
        memcpy(payload + codes + 2 * c, &frequency, 2);
      }
      const int64_t words = (16 * units - head) / 4 / chunks;
      for (int64_t i = 1; i < chunks; ++i) {
        const uint32_t begin = static_cast<uint32_t>(words * i - any % (words - 15) * (i == 1));
        memcpy(payload + head - 4 * (chunks - i), &begin, 4);
      }
    }
  }
  WriteChecksum(payload, count ? 16 * units : bytes);
}

}  // namespace cases

#endif  // HVDC_TESTS_NATIVE_CASES_H_
