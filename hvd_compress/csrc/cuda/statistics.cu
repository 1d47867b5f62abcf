// The pass over memory before encoding, where a group is larger than what is held: chunks are
// summed, a half warp each; then the chunks' sums, once or twice; columns go chunk of rows by
// chunk.
#define HVDC_ARCH device

#include "cuda/batch.h"
#include "cuda/encode_quads.h"
#include "cuda/finish.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/sums.h"

namespace hvdc {
namespace HVDC_ARCH {

// One element to encode. kResidual: the dtype of residuals.
template <int kDtype, int kResidual>
__device__ inline float ReadAs(const EncodeJob& job, int64_t element) {
  using E = Elements<Thread, kDtype>;
  using R = Elements<Thread, kResidual>;
  const float g = E::Load(job.gradient.As<const typename E::T>() + element);
  if (job.mode == Mode::kNone) return g;
  const float h = R::Load(job.residual.As<const typename R::T>() + element);
  return Compensate<Thread>(g, h, job.alpha);
}

__device__ inline void StoreGroup(const EncodeJob& job, int64_t group, int64_t count,
                                  const GroupStats& stats) {
  const GroupScale scale = ScaleOf(job.spec, stats, count);
  float* const scales = ScalesOf(job.payload);
  if (job.spec.codec == HVDC_ONEBIT) {
    scales[group] = scale.lower;
    scales[job.layout.scales / 2 + group] = scale.upper;
  } else {
    scales[group] = scale.sent;
  }
  if (job.workspace.scales && job.spec.grouping != HVDC_ROW) {
    job.workspace.scales[group] = scale;
  } else if (!scale.finite) {
    atomicOr(&job.workspace.control->nonfinite, 1u);
  }
}

__device__ inline int64_t RowElements(const EncodeJob& job, int64_t row) {
  const int64_t rest = job.layout.count - row * job.passes.length;
  return rest < job.passes.length ? rest : job.passes.length;
}

template <StatsKind kKind, int kResidual>
__device__ inline GroupStats SumOf(const EncodeJob& job, int64_t start, uint32_t count) {
  return WithDtype(job.dtype, [&](auto dtype) {
    return SumChunk<kKind>(count, [&](uint32_t i) {
      return ReadAs<decltype(dtype)::value, kResidual>(job, start + i);
    });
  });
}

// All chunks of all rows. A row of one chunk has its scale at once; where there is one group of no
// more chunks than can be added up in one go, the last block does that.
template <StatsKind kKind, int kResidual>
__global__ void __launch_bounds__(kThreads)
    SumAllChunks(const __grid_constant__ EncodeBatch batch) {
  Place place;
  const EncodeJob& job = batch.Open(&place);
  const Passes& passes = job.passes;
  const int64_t all = passes.rows * passes.chunks;
  const int64_t halves = 2 * static_cast<int64_t>(place.Warps());
  const int64_t half = threadIdx.x % kWarpSize / kLanes;
  // Both halves of a warp make as many rounds, the second one perhaps with nothing in its last.
  for (int64_t first = 2 * static_cast<int64_t>(place.Warp()); first < all; first += halves) {
    const int64_t index = first + half;
    const int64_t row = index / passes.chunks, chunk = index % passes.chunks;
    int64_t count = 0;
    if (index < all) count = RowElements(job, row) - chunk * kChunk;
    if (count < 0) count = 0;  // the last row's chunks may be fewer
    if (count > kChunk) count = kChunk;
    const int64_t start = row * passes.length + chunk * kChunk;
    const GroupStats stats = SumOf<kKind, kResidual>(job, start, static_cast<uint32_t>(count));
    if (index >= all || LaneOfSum()) continue;
    if (passes.chunks == 1) {
      StoreGroup(job, row, count, stats);
    } else {
      job.workspace.stats[index] = stats;
    }
  }
  if (passes.rows > 1 || passes.chunks == 1 || passes.folds) return;
  Control* const control = job.workspace.control;
  if (!LastBlock(place, control) || WarpOfBlock()) return;
  const GroupStats stats = SumChunks<kKind>(job.workspace.stats, passes.chunks);
  if (threadIdx.x) return;
  StoreGroup(job, 0, job.layout.count, stats);
  control->tickets = 0;
}

// 2,048 chunks' sums to one, a warp each.
template <StatsKind kKind>
__global__ void __launch_bounds__(kThreads) FoldChunks(const __grid_constant__ EncodeBatch batch) {
  Place place;
  const EncodeJob& job = batch.Open(&place);
  const Passes& passes = job.passes;
  for (int64_t i = place.Warp(); i < passes.rows * passes.folds; i += place.Warps()) {
    const int64_t row = i / passes.folds, first = i % passes.folds * kChunk;
    const int64_t rest = passes.chunks - first;
    const GroupStats stats = SumChunks<kKind>(job.workspace.stats + row * passes.chunks + first,
                                              rest < kChunk ? rest : static_cast<int64_t>(kChunk));
    if (LaneOfWarp() == 0) job.workspace.folded[i] = stats;
  }
}

// Adds up the rest of each row's sums, and makes its scale.
template <StatsKind kKind>
__global__ void __launch_bounds__(kThreads) FoldRows(const __grid_constant__ EncodeBatch batch) {
  Place place;
  const EncodeJob& job = batch.Open(&place);
  const Passes& passes = job.passes;
  const int64_t each = passes.folds ? passes.folds : passes.chunks;
  const GroupStats* const sums = passes.folds ? job.workspace.folded : job.workspace.stats;
  for (int64_t row = place.Warp(); row < passes.rows; row += place.Warps()) {
    const GroupStats stats = SumChunks<kKind>(sums + row * each, each);
    if (LaneOfWarp() == 0) StoreGroup(job, row, RowElements(job, row), stats);
  }
}

// Column sums of kRowChunk rows, a thread a column.
template <int kDtype, int kResidual>
__device__ inline void SumColumnsAs(const EncodeJob& job, const Place& place) {
  const int64_t columns = job.spec.columns;
  bool finite = true;
  for (int64_t i = place.Thread(); i < job.passes.chunks * columns; i += place.Threads()) {
    const int64_t first = i / columns * kRowChunk;
    const int64_t last = first + kRowChunk < job.spec.rows ? first + kRowChunk : job.spec.rows;
    float lower = 0, upper = 0;
    uint32_t above = 0;
#pragma unroll 8
    for (int64_t row = first; row < last; ++row) {
      const float x = ReadAs<kDtype, kResidual>(job, row * columns + i % columns);
      const bool side = Thread::GreaterEqual(x, 0.0f);
      finite = finite && IsFinite<Thread>(x);
      upper = Thread::AddWhere(upper, side, x);
      lower = Thread::AddWhere(lower, !side, x);
      above += static_cast<uint32_t>(Thread::Count(side));
    }
    job.workspace.lower[i] = lower;
    job.workspace.upper[i] = upper;
    job.workspace.above[i] = above;
  }
  if (!finite) atomicOr(&job.workspace.control->nonfinite, 1u);
}

template <int kResidual>
__global__ void __launch_bounds__(kThreads) SumColumns(const __grid_constant__ EncodeBatch batch) {
  Place place;
  const EncodeJob& job = batch.Open(&place);
  WithDtype(job.dtype,
            [&](auto dtype) { SumColumnsAs<decltype(dtype)::value, kResidual>(job, place); });
}

__global__ void __launch_bounds__(kThreads) FoldColumns(const __grid_constant__ EncodeBatch batch) {
  Place place;
  const EncodeJob& job = batch.Open(&place);
  const int64_t columns = job.spec.columns;
  for (int64_t column = place.Thread(); column < columns; column += place.Threads()) {
    GroupStats stats = {};
#pragma unroll 8
    for (int64_t chunk = 0; chunk < job.passes.chunks; ++chunk) {
      const int64_t at = chunk * columns + column;
      stats.lower = Thread::Add(stats.lower, job.workspace.lower[at]);
      stats.upper = Thread::Add(stats.upper, job.workspace.upper[at]);
      stats.above += static_cast<int32_t>(job.workspace.above[at]);
    }
    StoreGroup(job, column, job.spec.rows, stats);
  }
}

namespace {

template <StatsKind kKind, int kResidual>
Statistics RowStatistics(const EncodeJob& job) {
  const Passes& passes = job.passes;
  const auto blocks = [](int64_t work, int64_t each) { return (work + each - 1) / each; };
  Statistics all = {};
  all.sum = {SumAllChunks<kKind, kResidual>, blocks(passes.rows * passes.chunks, 2 * kWarps), 0};
  if (passes.folds) {
    all.fold_chunks = {FoldChunks<kKind>, blocks(passes.rows * passes.folds, kWarps), 0};
  }
  // SumAllChunks has not finished these by itself.
  if (passes.folds || (passes.rows > 1 && passes.chunks > 1)) {
    all.fold_groups = {FoldRows<kKind>, blocks(passes.rows, kWarps), 0};
  }
  return all;
}

template <int kResidual>
Statistics StatisticsWorkAs(const EncodeJob& job) {
  if (job.passes.columns) {
    const int64_t columns = job.spec.columns, sums = job.passes.chunks * columns;
    return {{SumColumns<kResidual>, (sums + kThreads - 1) / kThreads, 0},
            {},
            {FoldColumns, (columns + kThreads - 1) / kThreads, 0}};
  }
  switch (KindOf(job.spec)) {
    case StatsKind::kSides:
      return RowStatistics<StatsKind::kSides, kResidual>(job);
    case StatsKind::kSquares:
      return RowStatistics<StatsKind::kSquares, kResidual>(job);
    case StatsKind::kMoments:
      return RowStatistics<StatsKind::kMoments, kResidual>(job);
    default:
      return RowStatistics<StatsKind::kLargest, kResidual>(job);
  }
}

}  // namespace

Statistics StatisticsWork(const EncodeJob& job) {
  if (!job.passes.chunks) return {};
  return WithResidual(
      job, [&](auto residual) { return StatisticsWorkAs<decltype(residual)::value>(job); });
}

}  // namespace HVDC_ARCH
}  // namespace hvdc
