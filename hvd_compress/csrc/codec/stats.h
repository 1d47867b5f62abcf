// Chooses a spec's coder, and adds up, lane by lane, the sums from which a group's scale is made.
#ifndef HVDC_CODEC_STATS_H_
#define HVDC_CODEC_STATS_H_

#include "codec/cast.h"
#include "codec/coder.h"
#include "codec/ecq.h"
#include "codec/int8.h"
#include "codec/onebit.h"
#include "codec/ternary.h"

namespace hvdc {
namespace HVDC_ARCH {

HVDC_HD StatsKind KindOf(const hvdc_spec& spec) {
  switch (spec.codec) {
    case HVDC_ONEBIT:
      return StatsKind::kSides;
    case HVDC_INT8:
      return StatsKind::kLargest;
    case HVDC_TERNARY:
      return spec.factor != 0 ? StatsKind::kMoments : StatsKind::kLargest;
    case HVDC_ECQ:
      return spec.variant == HVDC_L2 ? StatsKind::kSquares : StatsKind::kLargest;
    default:
      return StatsKind::kNone;
  }
}

// The norm of a bucket from its sums, of codecs that have levels.
HVDC_HD float NormOf(const hvdc_spec& spec, const GroupStats& stats, int64_t count) {
  if (spec.codec == HVDC_ECQ) return EcqNorm(spec, stats.largest, stats.square);
  return TernaryNorm(spec, stats.largest, stats.sum, stats.square, count);
}

// The scale of a bucket from its norm.
HVDC_HD GroupScale ScaleOfNorm(const hvdc_spec& spec, float norm) {
  return spec.codec == HVDC_ECQ ? EcqScale(spec, norm) : TernaryScale(norm);
}

// A group's scale from its sums.
HVDC_HD GroupScale ScaleOf(const hvdc_spec& spec, const GroupStats& stats, int64_t count) {
  switch (spec.codec) {
    case HVDC_ONEBIT:
      return OneBitScale(stats.lower, stats.upper, stats.above, count,
                         stats.largest < kInfinityBits);
    case HVDC_INT8:
      return Int8Scale(spec, stats.largest);
    case HVDC_TERNARY:
    case HVDC_ECQ:
      return ScaleOfNorm(spec, NormOf(spec, stats, count));
    default: {
      GroupScale scale = {};
      scale.finite = scale.kept = true;
      return scale;
    }
  }
}

// The sums of one chunk.
template <class V, StatsKind kKind>
struct Accumulator {
  using F = typename V::F;
  static constexpr bool kSides = kKind == StatsKind::kSides;
  static constexpr bool kSum = kKind == StatsKind::kMoments;
  static constexpr bool kSquare = kKind == StatsKind::kSquares || kSum;

  HVDC_HD Accumulator() : largest(V::SetI(0)) {
    if constexpr (kSides) lower = upper = V::Set(0.0f);
    if constexpr (kSum) sum = V::ZeroD();
    if constexpr (kSquare) square = V::ZeroD();
  }

  HVDC_HD void Add(F x) {
    if constexpr (kKind == StatsKind::kNone) return;
    largest = V::MaxI(largest, AbsBits<V>(x));
    if constexpr (kSides) {
      // A sum that began at +0 is never -0, so that leaving an element out is adding +0.
      const typename V::M side = V::GreaterEqual(x, V::Set(0.0f));
      upper = V::AddWhere(upper, side, x);
      lower = V::AddWhere(lower, V::Not(side), x);
      above += V::Count(side);
    }
    if constexpr (kSum) sum = V::AddWide(sum, x);
    if constexpr (kSquare) square = V::AddWideSquare(square, x);
  }

  HVDC_HD void Finish(GroupStats* stats) const {
    if constexpr (kKind == StatsKind::kNone) return;
    stats->largest = V::LargestLane(largest);
    if constexpr (kSides) {
      stats->above = V::FoldCount(above);
      stats->lower = V::Fold(lower);
      stats->upper = V::Fold(upper);
    }
    if constexpr (kSum) stats->sum = V::FoldD(sum);
    if constexpr (kSquare) stats->square = V::FoldD(square);
  }

  typename V::I largest;
  F lower, upper;
  typename V::D sum, square;
  int32_t above = 0;
};

template <class C>
struct CoderType {
  using Type = C;
};

// Calls call with the CoderType of a valid spec whose codec sends every element.
template <class V, class Call>
auto WithCoder(const hvdc_spec& spec, const Call& call) {
  switch (spec.codec) {
    case HVDC_ONEBIT:
      if (spec.grouping >= HVDC_ROW) return call(CoderType<OneBitMatrixCoder<V>>());
      return call(CoderType<OneBitCoder<V>>());
    case HVDC_INT8:
      if (spec.variant == HVDC_LINEAR) return call(CoderType<LinearCoder<V>>());
      if (spec.variant == HVDC_E4M3) return call(CoderType<E4M3Coder<V>>());
      if (spec.variant == HVDC_E5M2) return call(CoderType<E5M2Coder<V>>());
      return call(CoderType<TableCoder<V>>());
    case HVDC_TERNARY:
      return call(CoderType<TernaryCoder<V>>());
    case HVDC_ECQ:
      return call(CoderType<EcqCoder<V>>());
    case HVDC_FP16:
      return call(CoderType<HalfCoder<V>>());
    case HVDC_BF16:
      if (spec.variant == HVDC_STOCHASTIC) return call(CoderType<BfloatCoder<V, true>>());
      return call(CoderType<BfloatCoder<V, false>>());
    default:
      return call(CoderType<FloatCoder<V>>());
  }
}

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CODEC_STATS_H_
