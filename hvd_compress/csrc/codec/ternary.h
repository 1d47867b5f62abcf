// TernGrad (Wen et al., 2017): minus one, zero or one times a scale, at random.
#ifndef HVDC_CODEC_TERNARY_H_
#define HVDC_CODEC_TERNARY_H_

#include "codec/coder.h"
#include "codec/half.h"
#include "codec/philox.h"

namespace hvdc {
namespace HVDC_ARCH {

// The absolute maximum after clipping; infinity where it is not finite. sum and square: of the
// elements and of their squares; used only where the spec clips.
HVDC_HD float TernaryNorm(const hvdc_spec& spec, uint32_t largest, double sum, double square,
                          int64_t count) {
  if (largest >= kInfinityBits) return BitsFloat(kInfinityBits);
  float top = BitsFloat(largest);
  if (spec.factor != 0) {
    const double size = static_cast<double>(count);
    const double mean = sum / size;
    const double spread = square / size - mean * mean;
    const double sigma = spread > 0.0 ? __builtin_sqrt(spread) : 0.0;
    const double clip = static_cast<double>(spec.factor) * sigma;
    const double least = __builtin_fabs(mean);
    const float limit = static_cast<float>(clip < least ? least : clip);
    if (limit < top) top = limit;
  }
  return top;
}

// The scale for the bucket's own norm, or for the largest among ranks.
HVDC_HD GroupScale TernaryScale(float norm) {
  GroupScale scale = {};
  scale.finite = FloatBits(norm) < kInfinityBits;
  if (!scale.finite) {
    scale.sent = BitsFloat(kNanBits);
    return scale;
  }
  scale.kept = norm >= kTiny;
  scale.inverse = scale.kept ? 1.0f / norm : 0.0f;
  scale.sent = scale.kept ? norm : 0.0f;
  return scale;
}

template <class V>
struct TernaryCoder : Coder<CodeType::kByte, Packing::kTrits, true> {
  static constexpr bool kAlwaysFinite = true;
  using F = typename V::F;
  using I = typename V::I;

  HVDC_HD explicit TernaryCoder(const CoderSetup&) {}
  HVDC_HD void SetGroup(const GroupScale& group) {
    inverse = V::Set(group.inverse);
    scale = V::Set(group.sent);
  }
  HVDC_HD I Code(F x, F uniform) const {
    const F probability = V::Mul(V::Min(Abs<V>(x), scale), inverse);
    // 1, or 2 where the sign bit is set: -0 has it too, but is never taken.
    const I digit = V::AddI(V::SetI(1), V::template ShiftRight<31>(V::Bits(x)));
    return V::SelectI(Happens<V>(uniform, probability), digit, V::SetI(0));
  }
  HVDC_HD F Decode(I digit, int64_t) const {
    // 0, 1, 2 to 0, 1, -1.
    const I half = V::template ShiftRight<1>(digit);
    const I level = V::SubI(V::SubI(V::SubI(digit, half), half), half);
    return V::Mul(V::ToFloat(level), scale);
  }
  HVDC_HD static I LoadCodes(const uint8_t* bytes) { return V::LoadBytes(bytes); }
  HVDC_HD uint32_t BlankCode() const { return 0; }

  F inverse, scale;
};

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CODEC_TERNARY_H_
