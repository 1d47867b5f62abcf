// 1-bit SGD (Seide et al., 2014): a threshold at zero and two reconstruction values a group.
#ifndef HVDC_CODEC_ONEBIT_H_
#define HVDC_CODEC_ONEBIT_H_

#include "codec/coder.h"
#include "codec/half.h"

namespace hvdc {
namespace HVDC_ARCH {

HVDC_HD float SideMean(float total, int64_t count) {
  return count > 0 ? total / static_cast<float>(count) : 0.0f;
}

HVDC_HD GroupScale OneBitScale(float lower, float upper, int64_t above, int64_t count,
                               bool finite) {
  GroupScale scale = {};
  scale.lower = SideMean(lower, count - above);
  scale.upper = SideMean(upper, above);
  scale.finite = finite && (FloatBits(scale.lower) & 0x7FFFFFFFu) < kInfinityBits &&
                 (FloatBits(scale.upper) & 0x7FFFFFFFu) < kInfinityBits;
  if (!scale.finite) scale.lower = scale.upper = BitsFloat(kNanBits);
  scale.kept = true;
  return scale;
}

// One pair of values for the whole block.
template <class V>
struct OneBitCoder : Coder<CodeType::kBit, Packing::kDirect, false> {
  using F = typename V::F;
  using M = typename V::M;

  HVDC_HD explicit OneBitCoder(const CoderSetup&) : lower(V::Set(0.0f)), upper(V::Set(0.0f)) {}
  HVDC_HD void SetGroup(const GroupScale& scale) {
    lower = V::Set(scale.lower);
    upper = V::Set(scale.upper);
  }
  HVDC_HD M Code(F x, F) const { return V::GreaterEqual(x, V::Set(0.0f)); }
  HVDC_HD F Decode(M bit, int64_t) const { return V::Select(bit, upper, lower); }

  F lower, upper;
};

// Every element has a pair of its own, by row or by column.
template <class V>
struct OneBitMatrixCoder : Coder<CodeType::kBit, Packing::kDirect, false> {
  using F = typename V::F;
  using M = typename V::M;

  HVDC_HD explicit OneBitMatrixCoder(const CoderSetup&) {}
  HVDC_HD void SetGroup(const GroupScale&) {}
  HVDC_HD M Code(F x, F) const { return V::GreaterEqual(x, V::Set(0.0f)); }
  HVDC_HD F Decode(M bit, int64_t element) const {
    return V::Select(bit, V::Load(upper + element), V::Load(lower + element));
  }

  const float* lower = nullptr;
  const float* upper = nullptr;
};

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CODEC_ONEBIT_H_
