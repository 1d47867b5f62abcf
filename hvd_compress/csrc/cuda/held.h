// A group in shared memory: read once, by the warps that encode it together, and summed there.
#ifndef HVDC_CUDA_HELD_H_
#define HVDC_CUDA_HELD_H_

#include "cuda/encode_quads.h"
#include "cuda/sums.h"

namespace hvdc {
namespace HVDC_ARCH {

constexpr uint32_t kWarpGroup = 1024;  // the largest group that a warp encodes by itself

// Floats of shared memory for one group.
HVDC_HD uint32_t HeldFloats(const EncodeJob& job) {
  return job.spec.group * (job.mode == Mode::kGeneral ? 2 : 1);
}

// Groups that a block holds at a time.
HVDC_HD uint32_t HeldGroups(const EncodeJob& job) {
  return job.spec.group > kWarpGroup ? 1 : static_cast<uint32_t>(kWarps);
}

// The warps that encode a group together: one, or all of a block.
struct Team {
  __device__ Team(const EncodeJob& job, const Place& place)
      : whole(HeldGroups(job) == 1),
        warps(whole ? kWarps : 1),
        rank(whole ? WarpOfBlock() : 0),
        index(whole ? place.block : place.Warp()),
        teams(whole ? place.blocks : place.Warps()),
        x(reinterpret_cast<float*>(SharedMemory()) + (whole ? 0 : WarpOfBlock()) * HeldFloats(job)),
        kept(x + job.spec.group) {}

  // All warps of a block, which hold what is encoded, and nothing else.
  __device__ explicit Team(float* memory)
      : whole(true),
        warps(kWarps),
        rank(WarpOfBlock()),
        index(0),
        teams(1),
        x(memory),
        kept(nullptr) {}

  // Called by all threads of the team, which then see what the others wrote to shared memory.
  __device__ void Meet() const {
    if (whole) {
      __syncthreads();
    } else {
      __syncwarp();
    }
  }

  __device__ bool IsFirstThread() const { return rank == 0 && LaneOfWarp() == 0; }

  __device__ void Store(uint32_t position, const Compensated& both, Mode mode) const {
    *reinterpret_cast<Quad*>(x + position) = both.x;
    if (mode == Mode::kGeneral && kept) *reinterpret_cast<Quad*>(kept + position) = both.kept;
  }

  bool whole;             // whether it is the block
  uint32_t warps, rank;   // of the team, and this warp's number among them
  uint32_t index, teams;  // this team's number, and how many the job has
  float* x;               // what is encoded
  float* kept;  // what the residual becomes before decoded is subtracted, where that differs
};

constexpr uint32_t kRowsAhead = 4;

// Whole rows of a warp's quads: several are asked for before the first of them is used. Where
// memory is not aligned to quads, element by element. kResidual: the dtype of residuals.
template <int kDtype, int kResidual, Mode kMode, bool kAligned>
__device__ inline void HoldRows(const EncodeJob& job, const Team& team, uint32_t start,
                                uint32_t rows) {
  for (uint32_t row = team.rank * kRowsAhead; row < rows; row += team.warps * kRowsAhead) {
    const uint32_t base = row * kRow + 4 * LaneOfWarp();
    Quad g[kRowsAhead], h[kRowsAhead] = {};
#pragma unroll
    for (uint32_t i = 0; i < kRowsAhead; ++i) {
      g[i] = LoadQuadAs<kDtype, kAligned>(job.gradient, start + base + i * kRow, 4);
      if constexpr (kMode != Mode::kNone) {
        h[i] = LoadQuadAs<kResidual, kAligned>(job.residual, start + base + i * kRow, 4);
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < kRowsAhead; ++i) {
      team.Store(base + i * kRow, CompensateQuad(job, kMode, g[i], h[i]), kMode);
    }
  }
}

template <int kDtype, int kResidual, bool kAligned>
__device__ inline void HoldRowsAs(const EncodeJob& job, const Team& team, uint32_t start,
                                  uint32_t rows) {
  switch (job.mode) {
    case Mode::kNone:
      return HoldRows<kDtype, kResidual, Mode::kNone, kAligned>(job, team, start, rows);
    case Mode::kShared:
      return HoldRows<kDtype, kResidual, Mode::kShared, kAligned>(job, team, start, rows);
    default:
      return HoldRows<kDtype, kResidual, Mode::kGeneral, kAligned>(job, team, start, rows);
  }
}

// The group of count elements from start on, into shared memory.
template <int kResidual>
__device__ inline void Hold(const EncodeJob& job, const Team& team, uint32_t start,
                            uint32_t count) {
  const uint32_t rows = count / (kRowsAhead * kRow) * kRowsAhead;
  WithDtype(job.dtype, [&](auto dtype) {
    constexpr int kDtype = decltype(dtype)::value;
    if (job.aligned) return HoldRowsAs<kDtype, kResidual, true>(job, team, start, rows);
    return HoldRowsAs<kDtype, kResidual, false>(job, team, start, rows);
  });
  const FromTensor<kResidual> source = {start};
  const uint32_t rest = (rows + team.rank) * kRow + 4 * LaneOfWarp();
  for (uint32_t position = rest; position < count; position += team.warps * kRow) {
    const uint32_t valid = ValidOf(position, count);
    team.Store(position,
               valid == 4 ? source.template Load<true>(job, position, 4)
                          : source.template Load<false>(job, position, valid),
               job.mode);
  }
}

// The held group's sums, for all of the team, which has met before. A half warp takes a chunk.
template <StatsKind kKind>
__device__ inline GroupStats SumHeld(const Team& team, uint32_t count) {
  constexpr uint32_t kMost = kHeldGroup / kChunk;
  static_assert(kMost <= 2 * kWarps, "a block has a half warp for every chunk");
  const auto sum_from = [&](uint32_t start) {
    const uint32_t rest = start < count ? count - start : 0;
    return SumChunk<kKind>(rest < kChunk ? rest : kChunk,
                           [&](uint32_t i) { return team.x[start + i]; });
  };
  // One chunk: both halves of the warp add up the same.
  if (!team.whole) return sum_from(0);
  __shared__ GroupStats parts[kMost];
  if (team.rank < (kMost + 1) / 2) {
    const uint32_t chunk = threadIdx.x / kLanes;
    const GroupStats one = sum_from(chunk * kChunk);
    if (LaneOfSum() == 0) parts[chunk] = one;
  }
  team.Meet();
  if (count <= kChunk) return parts[0];
  return SumChunks<kKind>(parts, (count + kChunk - 1) / kChunk);
}

// The sums that this coder's scale is made from.
template <class C>
__device__ inline GroupStats StatsOf(const EncodeJob& job, const Team& team, uint32_t count) {
  if constexpr (C::kType == CodeType::kBit) {
    return SumHeld<StatsKind::kSides>(team, count);
  } else if constexpr (C::kNoise) {
    constexpr StatsKind kKind =
        C::kPacking == Packing::kTrits ? StatsKind::kMoments : StatsKind::kSquares;
    if (KindOf(job.spec) == kKind) return SumHeld<kKind>(team, count);
  }
  return SumHeld<StatsKind::kLargest>(team, count);
}

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CUDA_HELD_H_
