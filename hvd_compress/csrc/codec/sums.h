// Sums whose order is part of the format (docs/format.md, "Sums").
#ifndef HVDC_CODEC_SUMS_H_
#define HVDC_CODEC_SUMS_H_

#include "codec/macros.h"
#include "codec/types.h"

namespace hvdc {
namespace HVDC_ARCH {

// Sixteen lanes to one: lane l adds lane l + 8, then l + 4, l + 2, l + 1.
template <class T>
HVDC_HD T FoldLanes(T* lanes) {
  for (int width = kLanes / 2; width; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

// The sum of a few values, or of many chunks' sums, which are overwritten: chunk by chunk, and then
// the chunks' sums by the same rule.
template <class T>
inline T LaneSum(T* values, int64_t count) {
  for (;;) {
    int64_t chunks = 0;
    for (int64_t start = 0; start < count; start += kChunk) {
      T lanes[kLanes] = {};
      const int64_t end = start + kChunk < count ? start + kChunk : count;
      for (int64_t i = start; i < end; ++i) lanes[(i - start) % kLanes] += values[i];
      values[chunks++] = FoldLanes(lanes);
    }
    if (chunks <= 1) return chunks ? values[0] : T(0);
    count = chunks;
  }
}

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CODEC_SUMS_H_
