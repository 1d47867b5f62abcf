// Error feedback around every codec: x = g + alpha h goes out, h <- (beta h + g) - decoded stays.
#ifndef HVDC_CODEC_FEEDBACK_H_
#define HVDC_CODEC_FEEDBACK_H_

#include "codec/macros.h"
#include "codec/types.h"

namespace hvdc {
namespace HVDC_ARCH {

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

// g + factor h. With factor = beta it is also what the residual becomes before decoded is
// subtracted: the order of the two terms does not change a sum's bits.
template <class V>
HVDC_HD typename V::F Compensate(typename V::F g, typename V::F h, typename V::F factor) {
  return V::Add(g, V::Mul(factor, h));
}

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CODEC_FEEDBACK_H_
