// A block's codes, a byte each, into the payload and out of it.
#ifndef HVDC_CPU_PACKING_H_
#define HVDC_CPU_PACKING_H_

#include <string.h>

#include "codec/layout.h"
#include "codec/trits.h"

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
    value = PushTrit(value, digits[3 * size + j]);
    value = PushTrit(value, digits[2 * size + j]);
    value = PushTrit(value, digits[size + j]);
    packed[j] = PushTrit(value, digits[j]);
  }
}

inline void UnpackTrits(const uint8_t* __restrict packed, int64_t count,
                        uint8_t* __restrict digits) {
  const int64_t size = TritBytes(count);
  for (int64_t j = 0; j < size; ++j) {
    const uint16_t q0 = packed[j];
    const uint16_t q1 = PopTrit(q0), q2 = PopTrit(q1), q3 = PopTrit(q2), q4 = PopTrit(q3);
    digits[j] = FirstTrit(q0, q1);
    digits[size + j] = FirstTrit(q1, q2);
    digits[2 * size + j] = FirstTrit(q2, q3);
    digits[3 * size + j] = FirstTrit(q3, q4);
    digits[4 * size + j] = static_cast<uint8_t>(q4 == 3 ? 0 : q4);  // no byte leaves more than 3
  }
}

// Unpacks the codes of a codec that has levels; reads and writes whole tiles.
template <class V>
inline void UnpackCodes(const hvdc_spec& spec, const uint8_t* packed, int64_t count,
                        uint8_t* codes) {
  if (spec.codec == HVDC_TERNARY) {
    UnpackTrits(packed, count, codes);
  } else {
    UnpackPlanes<V>(packed, count, EcqBits(spec.levels), codes);
  }
}

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CPU_PACKING_H_
