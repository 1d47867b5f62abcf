// The payload's checksum: the sum of word * (2 i + 1) over its 32-bit words, modulo 2**64.
#ifndef HVDC_CODEC_CHECKSUM_H_
#define HVDC_CODEC_CHECKSUM_H_

#include <string.h>

#include "codec/macros.h"
#include "codec/types.h"

namespace hvdc {
namespace HVDC_ARCH {

// The summand of one word of a payload of fewer than 2**31 words.
HVDC_HD uint64_t WeightedWord(uint32_t word, uint32_t index) {
  return static_cast<uint64_t>(word) * (2 * index + 1);
}

// The part of bytes [begin, end) of a payload; both are multiples of four.
template <class V>
inline uint64_t Checksum(const uint8_t* payload, int64_t begin, int64_t end) {
  // Within a piece weights count from its start, so that they fit 32 bits in a payload of any size.
  constexpr int64_t kPiece = 1 << 20;
  uint64_t total = 0;
  for (int64_t start = begin; start < end; start += kPiece) {
    const uint8_t* bytes = payload + start;
    const int64_t words = ((end - start < kPiece) ? end - start : kPiece) / 4;
    typename V::WordSums sums = V::ZeroSums();
    typename V::I weights = V::LaneNumbers();
    weights = V::AddI(V::AddI(weights, weights), V::SetI(1));
    int64_t i = 0;
    for (; i + kLanes <= words; i += kLanes) {
      V::AddWords(&sums, V::LoadWords(bytes + 4 * i), weights);
      weights = V::AddI(weights, V::SetI(2 * kLanes));
    }
    uint64_t weighted = 0, plain = 0;
    if (words >= kLanes) {
      weighted = V::Weighted(sums);
      plain = V::Unweighted(sums);
    }
    for (; i < words; ++i) {
      uint32_t word;
      memcpy(&word, bytes + 4 * i, 4);
      weighted += word * static_cast<uint64_t>(2 * i + 1);
      plain += word;
    }
    total += weighted + plain * static_cast<uint64_t>(start / 2);
  }
  return total;
}

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CODEC_CHECKSUM_H_
