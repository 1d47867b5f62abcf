// Five digits to base 3 in a byte, the first one least significant.
#ifndef HVDC_CODEC_TRITS_H_
#define HVDC_CODEC_TRITS_H_

#include "codec/macros.h"

namespace hvdc {
namespace HVDC_ARCH {

// Digits are pushed from the last one to the first; into a byte, or into the four of a word, where
// none overflows into the next.
template <class T>
HVDC_HD T PushTrit(T value, T digit) {
  return static_cast<T>(3 * value + digit);
}

// A byte without its first digit: 171 / 512 is a third, closely enough for all bytes.
HVDC_HD uint16_t PopTrit(uint16_t value) { return static_cast<uint16_t>(value * 171) >> 9; }

// The number of an element's digit in its byte; size: the bytes of the block.
HVDC_HD uint32_t DigitOf(uint32_t position, uint32_t size) {
  uint32_t digit = 0;
  for (uint32_t i = 1; i < 5; ++i) digit += position >= i * size;
  return digit;
}

// The first digit of value, of which rest is what is left. The top digit of bytes above 242, which
// no encoder writes, is 0.
HVDC_HD uint8_t FirstTrit(uint16_t value, uint16_t rest) {
  return static_cast<uint8_t>(value - 3 * rest);
}

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CODEC_TRITS_H_
