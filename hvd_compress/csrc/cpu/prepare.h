// The first half of encoding a block: gradient and residual are read, what is to be encoded goes to
// scratch memory, and its sums are taken on the way.
#ifndef HVDC_CPU_PREPARE_H_
#define HVDC_CPU_PREPARE_H_

#include <string.h>

#include <type_traits>

#include "codec/cast.h"
#include "codec/layout.h"
#include "codec/stats.h"
#include "codec/sums.h"
#include "cpu/kernels.h"
#include "cpu/residuals.h"
#include "cpu/rotation.h"

namespace hvdc {
namespace HVDC_ARCH {

// Reads count elements from start on, writes x (and kept, where the mode needs it), padded to
// sixteen elements. Sums are those of the whole range, in the documented order.
using PrepareFunction = void (*)(const EncodeJob& job, int64_t start, int64_t count, float* x,
                                 float* kept, GroupStats* stats);

template <class V, StatsKind kKind, int kDtype, Mode kMode>
struct Preparer {
  using E = Elements<V, kDtype>;
  using T = typename E::T;
  using F = typename V::F;
  // Float32 gradients without a residual are encoded from where they are.
  static constexpr bool kStore = kMode != Mode::kNone || kDtype != HVDC_DTYPE_FLOAT32;

  HVDC_HD static void Step(const T* g, const char* h, bool bfloat, float* x, float* kept, F alpha,
                           F beta, Accumulator<V, kKind>* sums) {
    const F gradient = E::Load(g);
    F value = gradient;
    if constexpr (kMode != Mode::kNone) {
      const F residual = LoadResidual<V>(h, bfloat);
      value = Compensate<V>(gradient, residual, alpha);
      if constexpr (kMode == Mode::kGeneral) {
        V::Store(kept, Compensate<V>(gradient, residual, beta));
      }
    }
    if constexpr (kStore) V::Store(x, value);
    sums->Add(value);
  }

  static void Chunk(const EncodeJob& job, const T* g, int64_t start, int64_t count, float* x,
                    float* kept, GroupStats* stats) {
    Accumulator<V, kKind> sums;
    const F a = V::Set(job.alpha), b = V::Set(job.beta);
    const int width = kMode == Mode::kNone ? 0 : job.residual_width;
    const char* h = kMode == Mode::kNone ? nullptr : job.ResidualAt(start);
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes, h += kLanes * width) {
      Step(g + i, h, width == 2, x + i, kept + i, a, b, &sums);
    }
    if (const int64_t rest = count - i) {
      T g_rest[kLanes] = {};
      char h_rest[kLanes * sizeof(float)] = {};
      memcpy(g_rest, g + i, static_cast<size_t>(rest) * sizeof(T));
      if constexpr (kMode != Mode::kNone) memcpy(h_rest, h, static_cast<size_t>(rest * width));
      Step(g_rest, h_rest, width == 2, x + i, kept + i, a, b, &sums);
      sums.above -= static_cast<int32_t>(kLanes - rest);
    }
    sums.Finish(stats);
  }

  static void Run(const EncodeJob& job, int64_t start, int64_t count, float* x, float* kept,
                  GroupStats* stats) {
    const T* g = static_cast<const T*>(job.gradient) + start;
    if (count <= kChunk) {
      Chunk(job, g, start, count, x, kept, stats);
      return;
    }
    constexpr int kChunks = kMaxGroup / kChunk;
    float lower[kChunks], upper[kChunks];
    double sum[kChunks], square[kChunks];
    GroupStats all = {};
    int chunks = 0;
    for (int64_t i = 0; i < count; i += kChunk) {
      GroupStats one = {};
      const int64_t size = count - i < kChunk ? count - i : kChunk;
      Chunk(job, g + i, start + i, size, x + i, kept + i, &one);
      lower[chunks] = one.lower;
      upper[chunks] = one.upper;
      sum[chunks] = one.sum;
      square[chunks] = one.square;
      if (one.largest > all.largest) all.largest = one.largest;
      all.above += one.above;
      ++chunks;
    }
    using A = Accumulator<V, kKind>;
    if constexpr (A::kSides) {
      all.lower = LaneSum(lower, chunks);
      all.upper = LaneSum(upper, chunks);
    }
    if constexpr (A::kSum) all.sum = LaneSum(sum, chunks);
    if constexpr (A::kSquare) all.square = LaneSum(square, chunks);
    *stats = all;
  }
};

// Calls call with the constant that value is; it is the last of them if it is none of the others.
template <auto first, auto... rest, class Value, class Call>
auto WithOneOf(Value value, const Call& call) {
  if constexpr (sizeof...(rest) > 0) {
    if (value != first) return WithOneOf<rest...>(value, call);
  }
  return call(std::integral_constant<decltype(first), first>());
}

template <class Call>
auto WithDtype(int dtype, const Call& call) {
  return WithOneOf<HVDC_DTYPE_FLOAT32, HVDC_DTYPE_FLOAT16, HVDC_DTYPE_BFLOAT16>(dtype, call);
}

template <class V>
inline PrepareFunction PickPrepare(StatsKind kind, int dtype, Mode mode) {
  using S = StatsKind;
  using M = Mode;
  return WithOneOf<S::kNone, S::kSides, S::kLargest, S::kSquares, S::kMoments>(kind, [=](auto k) {
    return WithDtype(dtype, [=](auto d) {
      return WithOneOf<M::kNone, M::kShared, M::kGeneral>(mode, [](auto m) -> PrepareFunction {
        return Preparer<V, decltype(k)::value, decltype(d)::value, decltype(m)::value>::Run;
      });
    });
  });
}

// Rotates a block that has been prepared into scratch.lower, and takes its sums.
template <class V>
inline void RotateBlock(const EncodeJob& job, int64_t block, const Scratch& scratch,
                        GroupStats* stats) {
  const int64_t count = BlockElements(job.layout, block);
  if (job.mode == Mode::kNone && job.dtype == HVDC_DTYPE_FLOAT32) {
    // Vectors would read past the end of the gradient.
    const float* gradient = static_cast<const float*>(job.gradient) + block * job.layout.block;
    memcpy(scratch.x, gradient, static_cast<size_t>(count) * sizeof(float));
  }
  ChangeSigns<V>(scratch.x, scratch.lower, count);
  TransformGroup<V>(scratch.lower, job.layout.block, count);
  EncodeJob rotated = {};
  rotated.gradient = scratch.lower;
  const PrepareFunction sums =
      Preparer<V, StatsKind::kLargest, HVDC_DTYPE_FLOAT32, Mode::kNone>::Run;
  sums(rotated, 0, count, scratch.upper, scratch.upper, stats);
}

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CPU_PREPARE_H_
