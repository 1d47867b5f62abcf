// Rounding to bfloat16 at random, and the noise with which residuals are rounded.
#ifndef HVDC_CODEC_ROUNDING_H_
#define HVDC_CODEC_ROUNDING_H_

#include "codec/feedback.h"
#include "codec/philox.h"

namespace hvdc {
namespace HVDC_ARCH {

// Adds noise, a number below 2**16, and drops the lower half: the result is the upper neighbour as
// often as x is near it. A NaN stays one if its lower half is 0.
template <class V>
HVDC_HD typename V::I RoundAtRandom(typename V::F x, typename V::I noise) {
  return V::template ShiftRight<16>(V::AddI(V::Bits(x), noise));
}

// Rounds the residuals of a tensor, tile by tile.
template <class V>
class Rounder {
 public:
  using F = typename V::F;
  using I = typename V::I;

  explicit Rounder(const NoiseState& noise) : noise_(noise) { noise_.step_high ^= 1u << 31; }

  // The tile of the codes that Round is called for next.
  void MoveTo(int64_t element) {
    if (element / kRounded != rounded_) {
      rounded_ = element / kRounded;
      I words[4];
      const I first = V::SetI(static_cast<uint32_t>(16 * rounded_));
      PhiloxWords<V>(noise_, V::AddI(first, V::LaneNumbers()), words);
      for (int word = 0; word < 4; ++word) {
        numbers_[2 * word] = V::And(words[word], V::SetI(0xFFFF));
        numbers_[2 * word + 1] = V::template ShiftRight<16>(words[word]);
      }
    }
    row_ = V::SetI(static_cast<uint32_t>(element % kRounded / kRow) << 13);
    part_ = static_cast<int>(element % kRow / kLanes);
  }

  // The lanes from element kLanes part of the tile on.
  I Round(int part, F x) const { return RoundAtRandom<V>(x, V::Xor(numbers_[part_ + part], row_)); }

 private:
  // Rows share their numbers, with the number of the row flipped in their upper bits.
  static constexpr int kRow = 128, kRounded = 1024;

  NoiseState noise_;
  int64_t rounded_ = -1;
  I numbers_[kRow / kLanes];
  I row_;
  int part_;
};

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CODEC_ROUNDING_H_
