// The common part of encoding and decoding: a block's scales, and the place of its codes.
#ifndef HVDC_CPU_BLOCKS_H_
#define HVDC_CPU_BLOCKS_H_

#include <string.h>

#include "codec/cast.h"
#include "codec/checksum.h"
#include "codec/layout.h"
#include "codec/stats.h"
#include "cpu/kernels.h"

namespace hvdc {
namespace HVDC_ARCH {

template <CodeType type>
struct CodeMemory {
  using T = uint8_t;
};
template <>
struct CodeMemory<CodeType::kHalf> {
  using T = uint16_t;
};
template <>
struct CodeMemory<CodeType::kWord> {
  using T = uint32_t;
};

HVDC_HD float LoadScale(const uint8_t* payload, int64_t index) {
  float value;
  memcpy(&value, payload + kHeaderBytes + 4 * index, 4);
  return value;
}

HVDC_HD void StoreScale(uint8_t* payload, int64_t index, float value) {
  memcpy(payload + kHeaderBytes + 4 * index, &value, 4);
}

// Blocks whose codes stay in the cache next to the core.
HVDC_HD int64_t BlocksPerRun(const Layout& layout) {
  constexpr int64_t kRunElements = 4096;
  return layout.block < kRunElements ? kRunElements / layout.block : 1;
}

// The checksum of the bytes that belong to blocks [first, last) alone: codes and own scales.
template <class V>
inline uint64_t BlocksChecksum(const hvdc_spec& spec, const Layout& layout, const uint8_t* payload,
                               int64_t first, int64_t last) {
  uint64_t sum = Checksum<V>(payload, BlockOffset(layout, first), RegionEnd(layout, last));
  if (IsContiguous(spec)) {
    const int64_t begin = kHeaderBytes + 4 * first, end = kHeaderBytes + 4 * last;
    sum += Checksum<V>(payload, begin, end);
    if (spec.codec == HVDC_ONEBIT) {
      const int64_t upper = 4 * layout.blocks;
      sum += Checksum<V>(payload, begin + upper, end + upper);
    }
  }
  return sum;
}

// 1-bit by row or column: the values of count elements from start on, copied from the payload.
inline void FillMatrixValues(const hvdc_spec& spec, const uint8_t* payload, int64_t start,
                             int64_t count, float* lower, float* upper) {
  const bool by_row = spec.grouping == HVDC_ROW;
  const int64_t groups = by_row ? spec.rows : spec.columns;
  int64_t row = start / spec.columns, column = start % spec.columns;
  for (int64_t i = 0; i < count;) {
    int64_t length = spec.columns - column;
    if (length > count - i) length = count - i;
    if (by_row) {
      const float low = LoadScale(payload, row), high = LoadScale(payload, groups + row);
      for (int64_t j = i; j < i + length; ++j) {
        lower[j] = low;
        upper[j] = high;
      }
    } else {
      const uint8_t* scales = payload + kHeaderBytes + 4 * column;
      memcpy(lower + i, scales, static_cast<size_t>(4 * length));
      memcpy(upper + i, scales + 4 * groups, static_cast<size_t>(4 * length));
    }
    i += length;
    column = 0;
    ++row;
  }
}

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CPU_BLOCKS_H_
