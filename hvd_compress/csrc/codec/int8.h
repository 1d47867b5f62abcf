// The 8-bit types (Dettmers, 2016, and OCP FP8): linear, and five that look magnitudes up in a
// table.
#ifndef HVDC_CODEC_INT8_H_
#define HVDC_CODEC_INT8_H_

#include <type_traits>

#include "codec/coder.h"
#include "codec/half.h"
#include "codec/layout.h"

namespace hvdc {
namespace HVDC_ARCH {

HVDC_HD GroupScale Int8Scale(const hvdc_spec& spec, uint32_t largest) {
  GroupScale scale = {};
  scale.finite = largest < kInfinityBits;
  float full = BitsFloat(largest);
  if (IsFixed(spec)) {
    scale.kept = scale.finite;
    full = spec.factor;
  } else {
    scale.kept = scale.finite && full >= kTiny;
  }
  const float top = spec.variant == HVDC_LINEAR ? 127.0f : spec.variant >= HVDC_E4M3 ? 1.75f : 1.0f;
  scale.inverse = scale.kept ? top / full : 0.0f;
  scale.sent = scale.kept ? UnitOf(full, top) : 0.0f;
  if (!scale.finite) scale.sent = BitsFloat(kNanBits);
  return scale;
}

template <class V>
struct LinearCoder : Coder<CodeType::kByte, Packing::kDirect, false> {
  static constexpr bool kAlwaysFinite = true;
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

// The codes of magnitudes, by the ladder: a look-up in memory a lane.
template <class V>
struct Ladder {
  using I = typename V::I;

  HVDC_HD explicit Ladder(const Int8Tables& tables)
      : entries(tables.ladder), first(V::SetI(tables.first)), last(V::SetI(tables.last)) {}
  template <int count>
  HVDC_HD void Codes(const I* magnitudes, I* found) const {
    for (int i = 0; i < count; ++i) found[i] = Code(magnitudes[i]);
  }
  HVDC_HD I Code(I magnitude) const {
    const I range = V::template ShiftRight<Int8Tables::kShift>(magnitude);
    const I index = V::SubI(V::MinI(V::MaxI(range, first), last), first);
    const I entry = V::Gather(entries, index);
    const I low = V::And(magnitude, V::SetI((1u << Int8Tables::kShift) - 1));
    const auto below = V::LessI(low, V::And(entry, V::SetI((2u << Int8Tables::kShift) - 1)));
    const I codes = V::SelectI(below, entry, V::template ShiftRight<7>(entry));
    return V::And(V::template ShiftRight<18>(codes), V::SetI(0x7F));
  }

  const uint32_t* entries;
  I first, last;
};

// The same by segments, whose tables are in registers. Where a place is too close to the edge of
// its code to be sure of it, the ladder answers.
template <class V>
struct Segments {
  using F = typename V::F;
  using I = typename V::I;

  HVDC_HD explicit Segments(const Int8Tables& tables)
      : ladder(tables),
        least(V::SetI(tables.least)),
        most(V::SetI(tables.most)),
        boundary(V::LoadTable32(tables.boundary)),
        segment(V::LoadTable32(tables.segment)),
        slope(V::LoadWords(tables.slope)),
        offset(V::LoadWords(tables.offset)),
        end(V::LoadWords(tables.end)) {}

  template <int count>
  HVDC_HD void Codes(const I* magnitudes, I* found) const {
    uint32_t unsure = 0;
    for (int i = 0; i < count; ++i) unsure |= Code(magnitudes[i], &found[i]);
    if (__builtin_expect(unsure != 0, 0)) ladder.template Codes<count>(magnitudes, found);
  }

  // Returns the lanes that are not sure.
  HVDC_HD uint32_t Code(I magnitude, I* code) const {
    const I y = V::MinI(V::MaxI(magnitude, least), most);
    const I octave = V::template ShiftRight<23>(y);
    const auto before = V::LessI(y, V::Lookup32(boundary, octave));
    const I number = V::Increment(V::Lookup32(segment, octave), V::Not(before));
    const F place = V::FusedMulAdd(V::FromBits(y), V::FromBits(V::Lookup16(slope, number)),
                                   V::FromBits(V::Lookup16(offset, number)));
    const I fixed = V::MinI(V::Round(place), V::Lookup16(end, number));
    *code = V::template ShiftRight<Int8Tables::kFraction>(fixed);
    // Thresholds, slopes and offsets are rounded: together they move a place by less than two
    // units.
    constexpr uint32_t kAllButTwoBits = (1u << Int8Tables::kFraction) - 4;
    return V::ToMaskBits(V::NoneOf(V::AddI(fixed, V::SetI(2)), kAllButTwoBits));
  }

  Ladder<V> ladder;
  I least, most;
  typename V::Table32 boundary, segment;
  I slope, offset, end;
};

// The codes of an 8-bit floating-point type, by rounding the float itself to nearest, ties to even.
template <class V, int kMantissa>
struct Narrowing {
  using I = typename V::I;

  HVDC_HD explicit Narrowing(const Int8Tables&) {}
  template <int count>
  HVDC_HD void Codes(const I* magnitudes, I* found) const {
    for (int i = 0; i < count; ++i) found[i] = Code(magnitudes[i]);
  }
  HVDC_HD I Code(I magnitude) const {
    constexpr int kShift = 23 - kMantissa;
    constexpr uint32_t kBias = FloatBias(kMantissa);
    // Below the normal numbers, codes are multiples of the smallest one: the sum rounds.
    const I magic = V::SetI((kBias + kShift + 1) << 23);
    const I small = V::SubI(V::Bits(V::Add(V::FromBits(magnitude), V::FromBits(magic))), magic);
    const I odd = V::And(V::template ShiftRight<kShift>(magnitude), V::SetI(1));
    const I half = V::SetI((1u << (kShift - 1)) - 1);
    const I rounded = V::template ShiftRight<kShift>(V::AddI(V::AddI(magnitude, half), odd));
    const auto below = V::LessI(magnitude, V::SetI((kBias + 1) << 23));
    return V::SelectI(below, small, V::SubI(rounded, V::SetI(kBias << kMantissa)));
  }
};

template <class V>
using TableSearch = typename std::conditional<V::kPermutes, Segments<V>, Ladder<V>>::type;

template <class V, class Search = TableSearch<V>>
struct TableCoder : Coder<CodeType::kByte, Packing::kDirect, false> {
  static constexpr bool kTogether = true;
  using F = typename V::F;
  using I = typename V::I;

  HVDC_HD explicit TableCoder(const CoderSetup& setup)
      : magnitudes(V::LoadTable(setup.tables->magnitudes)),
        search(*setup.tables),
        zero(setup.tables->zero) {}
  HVDC_HD void SetGroup(const GroupScale& group) {
    inverse = V::Set(group.inverse);
    scale = V::Set(group.sent);
  }
  HVDC_HD I Code(F x, F) const {
    I code;
    Codes<1>(&x, &code);
    return code;
  }
  // The codes of several vectors.
  template <int count>
  HVDC_HD void Codes(const F* x, I* codes) const {
    I bits[count], magnitude[count];
    for (int i = 0; i < count; ++i) {
      bits[i] = V::Bits(V::Mul(x[i], inverse));
      magnitude[i] = V::And(bits[i], V::SetI(0x7FFFFFFFu));
    }
    search.template Codes<count>(magnitude, codes);
    for (int i = 0; i < count; ++i) {
      const I sign = V::And(V::template ShiftRight<24>(bits[i]), V::SetI(0x80));
      codes[i] = V::Or(codes[i], sign);
    }
  }
  HVDC_HD F Decode(I code, int64_t) const {
    const F magnitude = V::Lookup(magnitudes, V::And(code, V::SetI(0x7F)));
    const I sign = V::template ShiftLeft<24>(V::And(code, V::SetI(0x80)));
    return V::Mul(V::FromBits(V::Or(V::Bits(magnitude), sign)), scale);
  }
  HVDC_HD static I LoadCodes(const uint8_t* bytes) { return V::LoadBytes(bytes); }
  HVDC_HD uint32_t BlankCode() const { return zero; }

  typename V::Table magnitudes;
  Search search;
  uint32_t zero;
  F inverse, scale;
};

template <class V>
using E4M3Coder = TableCoder<V, Narrowing<V, 3>>;
template <class V>
using E5M2Coder = TableCoder<V, Narrowing<V, 2>>;

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CODEC_INT8_H_
