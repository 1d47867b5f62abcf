// Lanes of a 32-bit word, each with a signed integer in it: words can be added as wholes, and a
// word of zeros adds nothing (docs/exchanges.md, "Integer sums").
#ifndef HVDC_CODEC_LANES_H_
#define HVDC_CODEC_LANES_H_

#include "codec/macros.h"

namespace hvdc {

constexpr int kWordBits = 32;
constexpr int kMaxLaneBits = 16;

namespace HVDC_ARCH {

HVDC_HD int LanesOf(int bits) { return kWordBits / bits; }

// Words of count lanes: word j holds values j, m + j, 2 m + j, ..., m being their number.
HVDC_HD int64_t LaneWords(int64_t count, int bits) {
  const int lanes = LanesOf(bits);
  return (count + lanes - 1) / lanes;
}

// A summand that makes every lane of a sum positive, so that none borrows from the next one.
HVDC_HD uint32_t LaneBias(int bits) {
  uint32_t bias = 0;
  for (int k = 0; k < LanesOf(bits); ++k) bias |= 1u << (bits * k + bits - 1);
  return bias;
}

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CODEC_LANES_H_
