// The 8-bit types (Dettmers, 2016): linear, and three that look magnitudes up in a table.
#ifndef HVDC_CODEC_INT8_H_
#define HVDC_CODEC_INT8_H_

#include "codec/coder.h"
#include "codec/feedback.h"
#include "codec/half.h"

namespace hvdc {
namespace HVDC_ARCH {

HVDC_HD GroupScale Int8Scale(const hvdc_spec& spec, uint32_t largest) {
  GroupScale scale = {};
  scale.finite = largest < kInfinityBits;
  float full = BitsFloat(largest);
  if (spec.variant == HVDC_LINEAR || spec.variant == HVDC_DYNAMIC) {
    scale.kept = scale.finite && full >= kTiny;
  } else {
    scale.kept = scale.finite;
    full = spec.factor;
  }
  const float top = spec.variant == HVDC_LINEAR ? 127.0f : 1.0f;
  scale.inverse = scale.kept ? top / full : 0.0f;
  scale.sent = scale.kept ? UnitOf(full, top) : 0.0f;
  if (!scale.finite) scale.sent = BitsFloat(kNanBits);
  return scale;
}

template <class V>
struct LinearCoder : Coder<CodeType::kByte, Packing::kDirect, false> {
  using F = typename V::F;
  using I = typename V::I;

  HVDC_HD explicit LinearCoder(const CoderSetup&) {}
  HVDC_HD void SetGroup(const GroupScale& group) {
    inverse = V::Set(group.inverse);
    scale = V::Set(group.sent);
  }
  HVDC_HD I Code(F x, F) const {
    const F y = V::Max(V::Min(V::Mul(x, inverse), V::Set(127.0f)), V::Set(-127.0f));
    return V::Round(y);
  }
  HVDC_HD F Decode(I code, int64_t) const { return V::Mul(V::ToFloat(code), scale); }
  HVDC_HD static I LoadCodes(const uint8_t* bytes) { return V::LoadSignedBytes(bytes); }
  HVDC_HD uint32_t BlankCode() const { return 0; }

  F inverse, scale;
};

template <class V>
struct TableCoder : Coder<CodeType::kByte, Packing::kDirect, false> {
  using F = typename V::F;
  using I = typename V::I;
  using M = typename V::M;

  HVDC_HD explicit TableCoder(const CoderSetup& setup)
      : magnitudes(V::LoadTable(setup.tables->magnitudes)), tables(setup.tables) {
    first = V::SetI(tables->first);
    last = V::SetI(tables->last);
  }
  HVDC_HD void SetGroup(const GroupScale& group) {
    inverse = V::Set(group.inverse);
    scale = V::Set(group.sent);
  }
  HVDC_HD I Code(F x, F) const {
    const I bits = V::Bits(V::Mul(x, inverse));
    const I magnitude = V::And(bits, V::SetI(0x7FFFFFFFu));
    const I range = V::template ShiftRight<Int8Tables::kShift>(magnitude);
    const I index = V::SubI(V::MinI(V::MaxI(range, first), last), first);
    const I entry = V::Gather(tables->ladder, index);
    const I low = V::And(magnitude, V::SetI((1u << Int8Tables::kShift) - 1));
    const M below = V::LessI(low, V::And(entry, V::SetI((2u << Int8Tables::kShift) - 1)));
    const I codes = V::SelectI(below, entry, V::template ShiftRight<7>(entry));
    const I code = V::And(V::template ShiftRight<18>(codes), V::SetI(0x7F));
    return V::Or(code, V::And(V::template ShiftRight<24>(bits), V::SetI(0x80)));
  }
  HVDC_HD F Decode(I code, int64_t) const {
    const F magnitude = V::Lookup(magnitudes, V::And(code, V::SetI(0x7F)));
    const I sign = V::template ShiftLeft<24>(V::And(code, V::SetI(0x80)));
    return V::Mul(V::FromBits(V::Or(V::Bits(magnitude), sign)), scale);
  }
  HVDC_HD static I LoadCodes(const uint8_t* bytes) { return V::LoadBytes(bytes); }
  HVDC_HD uint32_t BlankCode() const { return tables->zero; }

  typename V::Table magnitudes;
  const Int8Tables* tables;
  I first, last;
  F inverse, scale;
};

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CODEC_INT8_H_
