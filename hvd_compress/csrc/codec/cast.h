// Plain casts, and the element types of gradients and outputs.
#ifndef HVDC_CODEC_CAST_H_
#define HVDC_CODEC_CAST_H_

#include "codec/coder.h"
#include "codec/rounding.h"

namespace hvdc {
namespace HVDC_ARCH {

// bfloat16, rounded to nearest with ties to even; NaN becomes 0x7fc0.
template <class V>
HVDC_HD typename V::I ToBfloat(typename V::F x) {
  const typename V::I bits = V::Bits(x);
  const typename V::I odd = V::And(V::template ShiftRight<16>(bits), V::SetI(1));
  const typename V::I rounded =
      V::template ShiftRight<16>(V::AddI(V::AddI(bits, V::SetI(0x7FFF)), odd));
  const typename V::M nan = V::LessI(V::SetI(kInfinityBits), AbsBits<V>(x));
  return V::SelectI(nan, V::SetI(0x7FC0), rounded);
}

template <class V>
HVDC_HD typename V::F FromBfloat(typename V::I code) {
  return V::FromBits(V::template ShiftLeft<16>(code));
}

template <class V>
struct HalfCoder : Coder<CodeType::kHalf, Packing::kDirect, false> {
  using F = typename V::F;
  using I = typename V::I;

  HVDC_HD explicit HalfCoder(const CoderSetup&) {}
  HVDC_HD void SetGroup(const GroupScale&) {}
  HVDC_HD I Code(F x, F) const {
    const typename V::M nan = V::LessI(V::SetI(kInfinityBits), AbsBits<V>(x));
    return V::SelectI(nan, V::SetI(0x7E00), V::ToHalf(x));
  }
  HVDC_HD F Decode(I code, int64_t) const { return V::FromHalf(code); }
};

// Rounded to nearest, or at random.
template <class V, bool kRandom>
struct BfloatCoder : Coder<CodeType::kHalf, Packing::kDirect, kRandom> {
  using F = typename V::F;
  using I = typename V::I;

  HVDC_HD explicit BfloatCoder(const CoderSetup&) {}
  HVDC_HD void SetGroup(const GroupScale&) {}
  HVDC_HD I Code(F x, F uniform) const {
    if constexpr (!kRandom) return ToBfloat<V>(x);
    const I rounded = RoundAtRandom<V>(x, V::template ShiftRight<8>(V::Truncate(uniform)));
    const typename V::M nan = V::LessI(V::SetI(kInfinityBits), AbsBits<V>(x));
    return V::SelectI(nan, V::SetI(0x7FC0), rounded);
  }
  HVDC_HD F Decode(I code, int64_t) const { return FromBfloat<V>(code); }
};

template <class V>
struct FloatCoder : Coder<CodeType::kWord, Packing::kDirect, false> {
  using F = typename V::F;
  using I = typename V::I;

  HVDC_HD explicit FloatCoder(const CoderSetup&) {}
  HVDC_HD void SetGroup(const GroupScale&) {}
  HVDC_HD I Code(F x, F) const {
    const typename V::M nan = V::LessI(V::SetI(kInfinityBits), AbsBits<V>(x));
    return V::SelectI(nan, V::SetI(0x7FC00000), V::Bits(x));
  }
  HVDC_HD F Decode(I code, int64_t) const { return V::FromBits(code); }
};

// The types that tensors come in.
template <class V, int dtype>
struct Elements;

template <class V>
struct Elements<V, HVDC_DTYPE_FLOAT32> {
  using T = float;
  HVDC_HD static typename V::F Load(const T* p) { return V::Load(p); }
  HVDC_HD static void Store(T* p, typename V::F x) { V::Store(p, x); }
};

template <class V>
struct Elements<V, HVDC_DTYPE_FLOAT16> {
  using T = uint16_t;
  HVDC_HD static typename V::F Load(const T* p) { return V::FromHalf(V::LoadShorts(p)); }
  HVDC_HD static void Store(T* p, typename V::F x) { V::StoreShorts(p, V::ToHalf(x)); }
};

template <class V>
struct Elements<V, HVDC_DTYPE_BFLOAT16> {
  using T = uint16_t;
  HVDC_HD static typename V::F Load(const T* p) { return FromBfloat<V>(V::LoadShorts(p)); }
  HVDC_HD static void Store(T* p, typename V::F x) { V::StoreShorts(p, ToBfloat<V>(x)); }
};

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CODEC_CAST_H_
