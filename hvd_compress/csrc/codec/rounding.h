// Rounding to bfloat16 at random, and the noise with which residuals are rounded.
#ifndef HVDC_CODEC_ROUNDING_H_
#define HVDC_CODEC_ROUNDING_H_

#include "codec/coder.h"
#include "codec/philox.h"

namespace hvdc {
namespace HVDC_ARCH {

// Adds noise, a number below 2**16, and drops the lower half: the result is the upper neighbour as
// often as x is near it. A NaN stays one if its lower half is 0.
template <class V>
HVDC_HD typename V::I RoundAtRandom(typename V::F x, typename V::I noise) {
  return V::template ShiftRight<16>(V::AddI(V::Bits(x), noise));
}

// Sixteen counters, of four words each, serve a row of elements. Rows share their numbers, with the
// number of the row flipped in their upper bits.
constexpr int kRoundedRow = 128, kRounded = 1024;

// The noise that rounds residuals: that of a step whose number no codes use.
HVDC_HD NoiseState RoundingNoise(NoiseState noise) {
  noise.step_high ^= 1u << 31;
  return noise;
}

// The first of the sixteen counters that serve an element's row.
HVDC_HD uint32_t RoundingCounter(int64_t element) {
  return static_cast<uint32_t>(kLanes * (element / kRounded));
}

// The bits to flip in the numbers of an element's row.
HVDC_HD uint32_t RoundingFlip(int64_t element) {
  return static_cast<uint32_t>(element % kRounded / kRoundedRow) << 13;
}

// The numbers of two elements sixteen apart.
template <class V>
HVDC_HD void SplitWord(typename V::I word, typename V::I* numbers) {
  numbers[0] = V::And(word, V::SetI(0xFFFF));
  numbers[1] = V::template ShiftRight<16>(word);
}

// Rounds the residuals of a tensor, tile by tile.
template <class V>
class Rounder {
 public:
  using F = typename V::F;
  using I = typename V::I;

  explicit Rounder(const NoiseState& noise) : noise_(RoundingNoise(noise)) {}

  // The tile of the codes that Round is called for next.
  void MoveTo(int64_t element) {
    if (element / kRounded != rounded_) {
      rounded_ = element / kRounded;
      I words[4];
      PhiloxWords<V>(noise_, V::AddI(V::SetI(RoundingCounter(element)), V::LaneNumbers()), words);
      for (int word = 0; word < 4; ++word) SplitWord<V>(words[word], numbers_ + 2 * word);
    }
    row_ = V::SetI(RoundingFlip(element));
    part_ = static_cast<int>(element % kRoundedRow / kLanes);
  }

  // The lanes from element kLanes part of the tile on.
  I Round(int part, F x) const { return RoundAtRandom<V>(x, V::Xor(numbers_[part_ + part], row_)); }

 private:
  NoiseState noise_;
  int64_t rounded_ = -1;
  I numbers_[kRoundedRow / kLanes];
  I row_;
  int part_;
};

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CODEC_ROUNDING_H_
