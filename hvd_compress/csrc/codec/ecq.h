// QSGD and ECQ-SGD (Wu et al., 2018): evenly spaced levels below a norm, at random and without
// bias.
#ifndef HVDC_CODEC_ECQ_H_
#define HVDC_CODEC_ECQ_H_

#include "codec/coder.h"
#include "codec/half.h"
#include "codec/philox.h"

namespace hvdc {
namespace HVDC_ARCH {

// Infinity where it is not finite. square: the sum of the elements' squares; used only for the l2
// norm.
HVDC_HD float EcqNorm(const hvdc_spec& spec, uint32_t largest, double square) {
  if (largest >= kInfinityBits) return BitsFloat(kInfinityBits);
  if (spec.variant == HVDC_ROTATED_LINF && BitsFloat(largest) > kLargestRotated) {
    return BitsFloat(kInfinityBits);
  }
  if (spec.variant == HVDC_L2) return static_cast<float>(__builtin_sqrt(square));
  return BitsFloat(largest);
}

// The scale for the bucket's own norm, or for the largest among ranks.
HVDC_HD GroupScale EcqScale(const hvdc_spec& spec, float norm) {
  GroupScale scale = {};
  scale.finite = FloatBits(norm) < kInfinityBits;
  if (!scale.finite) {
    scale.sent = BitsFloat(kNanBits);
    return scale;
  }
  const float top = static_cast<float>(spec.levels);
  scale.kept = norm >= kTiny;
  scale.inverse = scale.kept ? top / norm : 0.0f;
  scale.sent = scale.kept ? UnitOf(norm, top) : 0.0f;
  return scale;
}

template <class V>
struct EcqCoder : Coder<CodeType::kByte, Packing::kPlanes, true> {
  static constexpr bool kAlwaysFinite = true;
  static constexpr bool kRotates = true;
  using F = typename V::F;
  using I = typename V::I;
  using M = typename V::M;

  HVDC_HD explicit EcqCoder(const CoderSetup& setup)
      : top(V::Set(static_cast<float>(setup.spec->levels))), middle(V::SetI(setup.spec->levels)) {}
  HVDC_HD void SetGroup(const GroupScale& group) {
    inverse = V::Set(group.inverse);
    scale = V::Set(group.sent);
  }
  HVDC_HD I Code(F x, F uniform) const {
    const F y = V::Min(V::Mul(Abs<V>(x), inverse), top);
    const I below = V::Truncate(y);
    const M up = Happens<V>(uniform, V::Sub(y, V::ToFloat(below)));
    const I level = V::SelectI(up, V::AddI(below, V::SetI(1)), below);
    const M negative = V::LessI(V::Bits(x), V::SetI(0));
    return V::SelectI(negative, V::SubI(middle, level), V::AddI(middle, level));
  }
  HVDC_HD F Decode(I code, int64_t) const {
    return V::Mul(V::ToFloat(V::SubI(code, middle)), scale);
  }
  HVDC_HD static I LoadCodes(const uint8_t* bytes) { return V::LoadBytes(bytes); }
  HVDC_HD uint32_t BlankCode() const { return 0; }

  F top, inverse, scale;
  I middle;
};

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CODEC_ECQ_H_
