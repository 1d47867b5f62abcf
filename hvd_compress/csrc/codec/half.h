// float16 and back, one number at a time, rounding to nearest with ties to even.
#ifndef HVDC_CODEC_HALF_H_
#define HVDC_CODEC_HALF_H_

#include <string.h>

#include "codec/macros.h"

namespace hvdc {
namespace HVDC_ARCH {

HVDC_HD uint32_t FloatBits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

HVDC_HD float BitsFloat(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

HVDC_HD uint32_t FloatToHalf(float value) {
  const uint32_t bits = FloatBits(value);
  const uint32_t sign = bits >> 16 & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return sign | 0x7E00u | (magnitude >> 13 & 0x3FFu);
  if (magnitude >= 0x47800000u) return sign | 0x7C00u;  // from 2**16 on
  if (magnitude < 0x38800000u) {
    // Below 2**-14 halves are multiples of 2**-24, and so are floats from 0.5 on: the sum rounds.
    return sign | (FloatBits(BitsFloat(magnitude) + 0.5f) - 0x3F000000u);
  }
  const uint32_t rounded = magnitude + 0xFFFu + (magnitude >> 13 & 1u);
  return sign | ((rounded >> 13) - (112u << 10));
}

HVDC_HD float HalfToFloat(uint32_t half) {
  const uint32_t sign = (half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7FFFu;
  if (magnitude >= 0x7C00u) return BitsFloat(sign | 0x7F800000u | (magnitude & 0x3FFu) << 13);
  if (magnitude < 0x400u) {
    return BitsFloat(sign | FloatBits(static_cast<float>(magnitude) * 0x1p-24f));
  }
  return BitsFloat(sign | ((magnitude << 13) + (112u << 23)));
}

// The difference of a float32's exponent and that of the 8-bit float with so many bits of mantissa,
// where the largest number is 1.75.
HVDC_HD constexpr uint32_t FloatBias(uint32_t mantissa) { return mantissa == 3 ? 112 : 97; }

// The value of code 1, where code top has to decode to full: their quotient, or the float below it
// where rounding has made it so large that code top would overflow.
HVDC_HD float UnitOf(float full, float top) {
  const float unit = full / top;
  return FloatBits(unit * top) < 0x7F800000u ? unit : BitsFloat(FloatBits(unit) - 1);
}

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CODEC_HALF_H_
