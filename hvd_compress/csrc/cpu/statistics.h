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

// Sums of sixteen columns, to which rows are added.
template <class V, int kDtype, bool kResidual>
struct ColumnAdder {
  using E = Elements<V, kDtype>;
  using T = typename E::T;
  using F = typename V::F;

  // rows of them, stride elements apart, each after the one before it.
  template <int rows>
  HVDC_HD void Add(const T* g, const char* h, int64_t stride, float* lower, float* upper,
                   uint32_t* above) {
    F low = V::Load(lower), high = V::Load(upper);
    typename V::I count = V::LoadWords(above);
    for (int row = 0; row < rows; ++row) {
      F x = E::Load(g + row * stride);
      if constexpr (kResidual) {
        x = Compensate<V>(x, LoadResidual<V>(h + row * stride * width, width == 2), alpha);
      }
      largest = V::MaxI(largest, AbsBits<V>(x));
      const typename V::M side = V::GreaterEqual(x, V::Set(0.0f));
      high = V::AddWhere(high, side, x);
      low = V::AddWhere(low, V::Not(side), x);
      count = V::Increment(count, side);
    }
    V::Store(upper, high);
    V::Store(lower, low);
    V::StoreWords(above, count);
  }

  F alpha;
  int width;  // bytes of a residual
  typename V::I largest;
};

template <class V, int kDtype, bool kResidual>
inline uint32_t ColumnStatsOf(const EncodeJob& job, int64_t row, int64_t rows, int64_t column,
                              int64_t width, const ColumnSums& sums) {
  using Adder = ColumnAdder<V, kDtype, kResidual>;
  using T = typename Adder::T;
  constexpr int kTogether = 4;  // rows for which the sums are read and written once
  const int64_t stride = job.spec->columns;
  const int64_t whole = width / kLanes * kLanes;
  const size_t rest = static_cast<size_t>(width - whole);
  float lower_rest[kLanes] = {}, upper_rest[kLanes] = {};
  uint32_t above_rest[kLanes] = {};
  for (int64_t i = 0; i < width; ++i) {
    sums.lower[i] = sums.upper[i] = 0;
    sums.above[i] = 0;
  }
  const int bytes = job.residual_width;
  Adder adder = {V::Set(job.alpha), bytes, V::SetI(0)};
  for (int64_t r = row, next; r < row + rows; r = next) {
    next = r + kTogether <= row + rows ? r + kTogether : r + 1;
    const T* g = static_cast<const T*>(job.gradient) + r * stride + column;
    const char* h = kResidual ? job.ResidualAt(r * stride + column) : nullptr;
    for (int64_t i = 0; i < whole; i += kLanes) {
      const char* residual = kResidual ? h + i * bytes : nullptr;
      float *lower = sums.lower + i, *upper = sums.upper + i;
      if (next - r == kTogether) {
        adder.template Add<kTogether>(g + i, residual, stride, lower, upper, sums.above + i);
      } else {
        adder.template Add<1>(g + i, residual, stride, lower, upper, sums.above + i);
      }
    }
    for (int64_t each = r; rest && each < next; ++each, g += stride) {
      T g_rest[kLanes] = {};
      char h_rest[kLanes * sizeof(float)] = {};
      memcpy(g_rest, g + whole, rest * sizeof(T));
      if (kResidual) {
        memcpy(h_rest, h + ((each - r) * stride + whole) * bytes,
               rest * static_cast<size_t>(bytes));
      }
      adder.template Add<1>(g_rest, h_rest, stride, lower_rest, upper_rest, above_rest);
    }
  }
  if (rest) {
    memcpy(sums.lower + whole, lower_rest, rest * sizeof(float));
    memcpy(sums.upper + whole, upper_rest, rest * sizeof(float));
    memcpy(sums.above + whole, above_rest, rest * sizeof(uint32_t));
  }
  return V::LargestLane(adder.largest);
}

template <class V>
inline uint32_t ColumnStats(const EncodeJob& job, int64_t row, int64_t rows, int64_t column,
                            int64_t width, const ColumnSums& sums) {
  return WithDtype(job.dtype, [&](auto dtype) {
    return WithOneOf<false, true>(job.mode != Mode::kNone, [&](auto residual) {
      return ColumnStatsOf<V, decltype(dtype)::value, decltype(residual)::value>(
          job, row, rows, column, width, sums);
    });
  });
}

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CPU_STATISTICS_H_
