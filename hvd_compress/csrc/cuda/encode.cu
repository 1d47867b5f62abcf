// Encoding: groups that a warp can hold in one pass; everything else with scales that are known.
#define HVDC_ARCH device

#include "cuda/batch.h"
#include "cuda/encode_quads.h"
#include "cuda/finish.h"
#include "cuda/held.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"

namespace hvdc {
namespace HVDC_ARCH {

// The blocks' scales are theirs alone: one thread stores them and adds them to the checksum.
template <class C>
__device__ inline void StoreOwnScales(const EncodeJob& job, uint32_t block, const GroupScale& scale,
                                      Totals* totals) {
  const auto store = [&](uint32_t index, float value) {
    ScalesOf(job.payload)[index] = value;
    totals->Word(FloatBits(value), kHeaderWords + index);
  };
  if constexpr (C::kType == CodeType::kBit) {
    store(block, scale.lower);
    store(job.blocks.count + block, scale.upper);
  } else {
    store(block, scale.sent);
  }
}

// One pass over memory, a team of warps a group.
template <class C, int kResidual>
__global__ void __launch_bounds__(kThreads) EncodeHeld(const __grid_constant__ EncodeBatch batch) {
  using Encoder = QuadEncoder<C, kResidual>;
  Place place;
  const EncodeJob& job = batch.Open(&place);
  const Team team(job, place);
  C coder(CoderSetup{&job.spec, job.workspace.tables + TableOf(job.spec)});
  Totals totals;
  for (uint32_t index = team.index; index < job.blocks.count; index += team.teams) {
    const uint32_t start = index * job.blocks.size;
    const uint32_t count = ElementsOfBlock(job.blocks, index);
    Hold<kResidual>(job, team, start, count);
    team.Meet();
    const GroupScale scale = ScaleOf(job.spec, StatsOf<C>(job, team, count), count);
    coder.SetGroup(scale);
    if (team.IsFirstThread()) StoreOwnScales<C>(job, index, scale, &totals);
    const Block<FromShared> block = {
        {team.x, team.kept, start}, CodesOfBlock(job.blocks, index), count};
    for (uint32_t row = team.rank * kRow; row < count; row += team.warps * kRow) {
      const uint32_t position = row + 4 * LaneOfWarp();
      if constexpr (C::kPacking == Packing::kTrits) {
        Encoder::HoldDigits(job, coder, scale, block, position, team.x, &totals);
      } else {
        Encoder::Run(job, coder, scale, block, position, &totals);
      }
    }
    if constexpr (C::kPacking == Packing::kTrits) {
      team.Meet();
      const uint32_t words = WordsOfBlock(job.blocks, index);
      for (uint32_t word = team.rank * kWarpSize + LaneOfWarp(); word < words;
           word += team.warps * kWarpSize) {
        Encoder::PackDigits(job, block, word, words, &totals);
      }
    }
    team.Meet();
  }
  FinishPayload(job, place, totals);
}

// Memory for the values of a quad whose elements belong to different groups.
struct QuadValues {
  float lower[4], upper[4];
};

// The scale of a group that was summed before this kernel, in the coder as well. Where elements
// have values of their own (a matrix), or none (a cast), any scale will do.
template <class C>
__device__ inline GroupScale OpenGroup(const EncodeJob& job, uint32_t group, bool finite,
                                       C* coder) {
  GroupScale scale = {};
  scale.finite = finite;
  scale.kept = true;
  if constexpr (!C::kCast && !std::is_same<C, OneBitMatrixCoder<Thread>>::value) {
    scale = job.workspace.scales[group];
    coder->SetGroup(scale);
  }
  return scale;
}

// A quad a thread, or a word of trits, wherever it lies.
template <class C, int kResidual>
__global__ void __launch_bounds__(kThreads) EncodeKnown(const __grid_constant__ EncodeBatch batch) {
  using Encoder = QuadEncoder<C, kResidual>;
  Place place;
  const EncodeJob& job = batch.Open(&place);
  const Blocks& blocks = job.blocks;
  C coder(CoderSetup{&job.spec, job.workspace.tables + TableOf(job.spec)});
  const bool finite = C::kCast || !job.workspace.control->nonfinite;
  const bool own = IsContiguous(job.spec);
  GroupScale scale = {};
  if (blocks.count) scale = OpenGroup(job, 0, finite, &coder);
  QuadValues values;
  Totals totals;
  const auto block_at = [&](uint32_t index) {
    return Block<FromTensor<kResidual>>{
        {index * blocks.size}, CodesOfBlock(blocks, index), ElementsOfBlock(blocks, index)};
  };
  if constexpr (C::kPacking == Packing::kTrits) {
    const uint32_t all = blocks.count ? (blocks.count - 1) * blocks.words + blocks.last_words : 0;
    for (uint32_t first = place.Warp() * kWarpSize; first < all; first += place.Threads()) {
      // Past the end a thread only helps its neighbours.
      const uint32_t at = first + LaneOfWarp();
      const uint32_t index = at < all ? Quotient(blocks.by_words, at) : 0;
      if (own) scale = OpenGroup(job, index, finite, &coder);
      Encoder::Trits(job, coder, scale, block_at(index), at - index * blocks.words,
                     at < all ? WordsOfBlock(blocks, index) : 0, &totals);
    }
  } else {
    for (uint32_t first = place.Warp() * kRow; first < blocks.elements;
         first += place.Warps() * kRow) {
      const uint32_t element = first + 4 * LaneOfWarp();
      // Past the end a thread only helps its neighbours with their planes: those of the last tile,
      // or nobody with anything.
      const bool help = element / kTile * kTile < blocks.elements;
      const uint32_t index = help ? Quotient(blocks.by_size, element) : 0;
      if (own) scale = OpenGroup(job, index, finite, &coder);
      if constexpr (std::is_same<C, OneBitMatrixCoder<Thread>>::value) {
        LoadMatrixValues(job.spec, job.payload, help ? element : 0, values.lower, values.upper);
        coder.lower = values.lower;
        coder.upper = values.upper;
      }
      const uint32_t position = help ? element - index * blocks.size : blocks.size;
      Encoder::Run(job, coder, scale, block_at(index), position, &totals);
    }
  }
  AddSharedScales(job, place, finite, &totals);
  FinishPayload(job, place, totals);
}

Work<EncodeBatch> EncodeWork(const EncodeJob& job) {
  if (job.spec.codec == HVDC_TOPK) return TopKEncodeWork(job);
  return WithResidual(job, [&](auto residual) {
    constexpr int kResidual = decltype(residual)::value;
    return WithCoder<Thread>(job.spec, [&](auto coder) -> Work<EncodeBatch> {
      using C = typename decltype(coder)::Type;
      if constexpr (!C::kCast && !std::is_same<C, OneBitMatrixCoder<Thread>>::value) {
        if (job.passes.held) {
          const uint32_t groups = HeldGroups(job);
          const int64_t blocks = (job.layout.blocks + groups - 1) / groups;
          return {EncodeHeld<C, kResidual>, blocks, sizeof(float) * groups * HeldFloats(job)};
        }
      }
      return {EncodeKnown<C, kResidual>, BlocksForQuads(job.layout.count), 0};
    });
  });
}

}  // namespace HVDC_ARCH
}  // namespace hvdc
