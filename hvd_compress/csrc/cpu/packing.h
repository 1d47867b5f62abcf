// A block's codes, a byte each, into the payload and out of it.
#ifndef HVDC_CPU_PACKING_H_
#define HVDC_CPU_PACKING_H_

#include <string.h>

#include "codec/layout.h"

namespace hvdc {
namespace HVDC_ARCH {

// codes is padded with zeros to a multiple of 64.
template <class V>
inline void PackPlanes(const uint8_t* codes, int64_t count, int bits, uint8_t* packed) {
  for (int64_t i = 0; i < count; i += kTile) {
    V::PackPlanes(codes + i, bits, packed);
    packed += 8 * bits;
  }
}

template <class V>
inline void UnpackPlanes(const uint8_t* packed, int64_t count, int bits, uint8_t* codes) {
  for (int64_t i = 0; i < count; i += kTile) {
    V::UnpackPlanes(packed, bits, codes + i);
    packed += 8 * bits;
  }
}

// digits is padded with zeros to five times the bytes that they take. The loops are left to the
// compiler's vectorizer: digits of one byte stand far apart, those of neighbours side by side.
inline void PackTrits(const uint8_t* __restrict digits, int64_t count, uint8_t* __restrict packed) {
  const int64_t size = TritBytes(count);
  for (int64_t j = 0; j < size; ++j) {
    uint8_t value = digits[4 * size + j];
    value = static_cast<uint8_t>(3 * value + digits[3 * size + j]);
    value = static_cast<uint8_t>(3 * value + digits[2 * size + j]);
    value = static_cast<uint8_t>(3 * value + digits[size + j]);
    packed[j] = static_cast<uint8_t>(3 * value + digits[j]);
  }
}

inline void UnpackTrits(const uint8_t* __restrict packed, int64_t count,
                        uint8_t* __restrict digits) {
  const int64_t size = TritBytes(count);
  for (int64_t j = 0; j < size; ++j) {
    // 171 / 512 is a third, closely enough for all bytes.
    const uint16_t q0 = packed[j];
    const uint16_t q1 = static_cast<uint16_t>(q0 * 171) >> 9;
    const uint16_t q2 = static_cast<uint16_t>(q1 * 171) >> 9;
    const uint16_t q3 = static_cast<uint16_t>(q2 * 171) >> 9;
    const uint16_t q4 = static_cast<uint16_t>(q3 * 171) >> 9;
    digits[j] = static_cast<uint8_t>(q0 - 3 * q1);
    digits[size + j] = static_cast<uint8_t>(q1 - 3 * q2);
    digits[2 * size + j] = static_cast<uint8_t>(q2 - 3 * q3);
    digits[3 * size + j] = static_cast<uint8_t>(q3 - 3 * q4);
    // Bytes above 242, which no encoder writes, would have a top digit of 3.
    digits[4 * size + j] = static_cast<uint8_t>(q4 == 3 ? 0 : q4);
  }
}

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CPU_PACKING_H_
