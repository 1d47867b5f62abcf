// Top-k (Aji and Heafield, 2017): the codes of values, and the unit of a chunk's values.
#ifndef HVDC_CODEC_TOPK_H_
#define HVDC_CODEC_TOPK_H_

#include "codec/half.h"
#include "codec/layout.h"

namespace hvdc {
namespace HVDC_ARCH {

// The fit of some multiples to magnitudes.
struct TopKFit {
  double products;  // the sum of magnitudes times multiples
  int64_t squares;  // the sum of the multiples' squares

  // The decrease of the sum of the magnitudes' squares by the fit.
  HVDC_HD double gain() const { return products * products / static_cast<double>(squares); }
};

// The meaning of an entry's bits.
struct TopKFormat {
  HVDC_HD explicit TopKFormat(const hvdc_spec& spec)
      : index_bits(TopKIndexBits(spec)),
        value_bits(static_cast<int>(spec.variant)),
        top(static_cast<float>(1u << ((value_bits - 1) & 7))) {}

  HVDC_HD bool floats() const { return value_bits == kTopKFloatBits; }

  // The code of a number whose magnitude is a multiple of the unit.
  HVDC_HD uint32_t Code(uint32_t multiple, bool negative) const {
    return (multiple - 1) | (negative ? 1u << (value_bits - 1) : 0);
  }

  HVDC_HD float Value(uint32_t code, float unit) const {
    if (floats()) return BitsFloat(code);
    const uint32_t half = 1u << (value_bits - 1);
    const float magnitude = static_cast<float>((code & (half - 1)) + 1) * unit;
    return code & half ? -magnitude : magnitude;
  }

  // The divisor of the mean magnitude for the second try.
  HVDC_HD double middle() const { return top > 2 ? static_cast<double>(top) / 2 : 1.0; }

  // The unit that fits multiples best.
  HVDC_HD float Unit(const TopKFit& fit) const {
    const float unit = static_cast<float>(fit.products / static_cast<double>(fit.squares));
    const float most = 0x1.fffffep127f / top;
    return unit < most ? unit : most;
  }

  int index_bits, value_bits;
  float top;
};

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CODEC_TOPK_H_
