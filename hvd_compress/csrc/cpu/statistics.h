// The first pass over memory, where a group is larger than a block: rows, columns, whole tensors.
#ifndef HVDC_CPU_STATISTICS_H_
#define HVDC_CPU_STATISTICS_H_

#include "cpu/prepare.h"

namespace hvdc {
namespace HVDC_ARCH {

template <class V>
inline void ChunkStats(const EncodeJob& job, int64_t row_length, int64_t first, int64_t last,
                       const Scratch& scratch, GroupStats* stats) {
  const PrepareFunction prepare = PickPrepare<V>(KindOf(*job.spec), job.dtype, job.mode);
  const int64_t chunks = (row_length + kChunk - 1) / kChunk;
  for (int64_t i = first; i < last; ++i) {
    const int64_t row = i / chunks, begin = i % chunks * kChunk;
    const int64_t rest = row_length - begin;
    stats[i] = GroupStats();
    prepare(job, row * row_length + begin, rest < kChunk ? rest : kChunk, scratch.x, scratch.kept,
            &stats[i]);
  }
}

template <class V, int kDtype, bool kResidual>
inline uint32_t ColumnStatsOf(const EncodeJob& job, int64_t row, int64_t rows, int64_t column,
                              int64_t width, const ColumnSums& sums) {
  using E = Elements<V, kDtype>;
  using T = typename E::T;
  using F = typename V::F;
  using M = typename V::M;
  const F alpha = V::Set(job.alpha);
  typename V::I largest = V::SetI(0);
  const auto add = [&](const T* g, const float* h, float* lower, float* upper, uint32_t* above) {
    F x = E::Load(g);
    if constexpr (kResidual) x = Compensate<V>(x, V::Load(h), alpha);
    largest = V::MaxI(largest, AbsBits<V>(x));
    const M side = V::GreaterEqual(x, V::Set(0.0f));
    V::Store(upper, V::AddWhere(V::Load(upper), side, x));
    V::Store(lower, V::AddWhere(V::Load(lower), V::Not(side), x));
    V::StoreWords(above, V::Increment(V::LoadWords(above), side));
  };
  const int64_t whole = width / kLanes * kLanes;
  const size_t rest = static_cast<size_t>(width - whole);
  float lower_rest[kLanes] = {}, upper_rest[kLanes] = {};
  uint32_t above_rest[kLanes] = {};
  for (int64_t i = 0; i < width; ++i) {
    sums.lower[i] = sums.upper[i] = 0;
    sums.above[i] = 0;
  }
  for (int64_t r = row; r < row + rows; ++r) {
    const int64_t at = r * job.spec->columns + column;
    const T* g = static_cast<const T*>(job.gradient) + at;
    const float* h = kResidual ? job.residual + at : nullptr;
    for (int64_t i = 0; i < whole; i += kLanes) {
      add(g + i, kResidual ? h + i : nullptr, sums.lower + i, sums.upper + i, sums.above + i);
    }
    if (rest) {
      T g_rest[kLanes] = {};
      float h_rest[kLanes] = {};
      memcpy(g_rest, g + whole, rest * sizeof(T));
      if (kResidual) memcpy(h_rest, h + whole, rest * sizeof(float));
      add(g_rest, h_rest, lower_rest, upper_rest, above_rest);
    }
  }
  if (rest) {
    memcpy(sums.lower + whole, lower_rest, rest * sizeof(float));
    memcpy(sums.upper + whole, upper_rest, rest * sizeof(float));
    memcpy(sums.above + whole, above_rest, rest * sizeof(uint32_t));
  }
  return V::LargestLane(largest);
}

template <class V>
inline uint32_t ColumnStats(const EncodeJob& job, int64_t row, int64_t rows, int64_t column,
                            int64_t width, const ColumnSums& sums) {
  switch (2 * job.dtype + (job.mode != Mode::kNone)) {
    case 0:
      return ColumnStatsOf<V, HVDC_DTYPE_FLOAT32, false>(job, row, rows, column, width, sums);
    case 1:
      return ColumnStatsOf<V, HVDC_DTYPE_FLOAT32, true>(job, row, rows, column, width, sums);
    case 2:
      return ColumnStatsOf<V, HVDC_DTYPE_FLOAT16, false>(job, row, rows, column, width, sums);
    case 3:
      return ColumnStatsOf<V, HVDC_DTYPE_FLOAT16, true>(job, row, rows, column, width, sums);
    case 4:
      return ColumnStatsOf<V, HVDC_DTYPE_BFLOAT16, false>(job, row, rows, column, width, sums);
    default:
      return ColumnStatsOf<V, HVDC_DTYPE_BFLOAT16, true>(job, row, rows, column, width, sums);
  }
}

template <class V>
inline void SquareChunks(const float* values, int64_t count, int64_t first, int64_t last,
                         double* sums) {
  for (int64_t chunk = first; chunk < last; ++chunk) {
    const int64_t start = chunk * kChunk;
    const int64_t end = count - start < kChunk ? count : start + kChunk;
    Accumulator<V, StatsKind::kSquares> squares;
    int64_t i = start;
    for (; i + kLanes <= end; i += kLanes) squares.Add(V::Load(values + i));
    float rest[kLanes] = {};
    memcpy(rest, values + i, static_cast<size_t>(end - i) * sizeof(float));
    squares.Add(V::Load(rest));
    GroupStats stats = {};
    squares.Finish(&stats);
    sums[chunk] = stats.square;
  }
}

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CPU_STATISTICS_H_
