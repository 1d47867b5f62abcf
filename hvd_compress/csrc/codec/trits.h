// Five digits to base 3 in a byte, the first one least significant.
#ifndef HVDC_CODEC_TRITS_H_
#define HVDC_CODEC_TRITS_H_

#include "codec/macros.h"

namespace hvdc {
namespace HVDC_ARCH {

// Digits are pushed from the last one to the first.
HVDC_HD uint8_t PushTrit(uint8_t value, uint8_t digit) {
  return static_cast<uint8_t>(3 * value + digit);
}

// What is left of a byte without its first digit: 171 / 512 is a third, closely enough for all
// bytes.
HVDC_HD uint16_t PopTrit(uint16_t value) { return static_cast<uint16_t>(value * 171) >> 9; }

// The first digit of value, of which rest is what is left. The top digit of bytes above 242, which
// no encoder writes, is 0.
HVDC_HD uint8_t FirstTrit(uint16_t value, uint16_t rest) {
  return static_cast<uint8_t>(value - 3 * rest);
}

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CODEC_TRITS_H_
