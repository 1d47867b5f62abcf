// The interface of a coder, the mathematics of one codec for a group of elements, and what coders
// share.
//
// A coder has
//   SetGroup(scale)          the group that follows;
//   Code(x, uniform)         the lanes' codes; uniform is set where kNoise;
//   Codes<count>(x, codes)   where kTogether: the codes of count vectors, without noise;
//   Decode(code, element)    their float32 values; element: the first lane's position in the block;
//   BlankCode()              bytes only: the code of every element of a group that is not finite;
//   LoadCodes(bytes)         bytes only: sixteen codes from memory.
// Nothing in it depends on the number of lanes.
#ifndef HVDC_CODEC_CODER_H_
#define HVDC_CODEC_CODER_H_

#include "codec/macros.h"
#include "codec/types.h"

namespace hvdc {
namespace HVDC_ARCH {

enum class CodeType { kBit, kByte, kHalf, kWord };  // the form of a code before packing
enum class Packing { kDirect, kPlanes, kTrits };    // its form in the payload

// The data from which a coder is made.
struct CoderSetup {
  const hvdc_spec* spec;
  const Int8Tables* tables;
};

template <CodeType type, Packing packing, bool noise>
struct Coder {
  static constexpr CodeType kType = type;
  static constexpr Packing kPacking = packing;
  static constexpr bool kNoise = noise;
  static constexpr bool kCast = type == CodeType::kHalf || type == CodeType::kWord;
  // Whether codes of a finite group cannot decode to Inf, as where the scale is made by UnitOf.
  static constexpr bool kAlwaysFinite = false;
  // Whether groups may be rotated (IsRotated).
  static constexpr bool kRotates = false;
  // Whether it has Codes(), for several vectors at a time.
  static constexpr bool kTogether = false;
};

template <class V>
HVDC_HD typename V::I AbsBits(typename V::F x) {
  return V::And(V::Bits(x), V::SetI(0x7FFFFFFFu));
}

template <class V>
HVDC_HD typename V::F Abs(typename V::F x) {
  return V::FromBits(AbsBits<V>(x));
}

template <class V>
HVDC_HD typename V::M IsFinite(typename V::F x) {
  return V::LessI(AbsBits<V>(x), V::SetI(kInfinityBits));
}

// Error feedback around every codec: x = g + alpha h goes out, h <- (beta h + g) - decoded stays.
// This is g + factor h, with either factor: the order of the terms does not change a sum's bits.
template <class V>
HVDC_HD typename V::F Compensate(typename V::F g, typename V::F h, typename V::F factor) {
  return V::Add(g, V::Mul(factor, h));
}

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CODEC_CODER_H_
