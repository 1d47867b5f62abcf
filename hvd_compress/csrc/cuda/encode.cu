// Encoding: groups that a warp can hold in one pass; everything else with scales that are known.
#define HVDC_ARCH device

#include "cuda/encode_quads.h"
#include "cuda/finish.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/sums.h"

namespace hvdc {
namespace HVDC_ARCH {

constexpr uint32_t kRowsAhead = 4;

__device__ inline void StoreHeld(const Compensated& both, uint32_t position, float* x, float* kept,
                                 Mode mode) {
  *reinterpret_cast<Quad*>(x + position) = both.x;
  if (mode == Mode::kGeneral) *reinterpret_cast<Quad*>(kept + position) = both.kept;
}

// Whole rows of a warp's quads into shared memory, as what is encoded: several rows are asked for
// before the first of them is used.
template <int kDtype, Mode kMode>
__device__ inline void HoldRows(const EncodeJob& job, uint32_t start, uint32_t rows, float* x,
                                float* kept) {
  for (uint32_t row = 0; row < rows; row += kRowsAhead) {
    const uint32_t base = row * kRow + 4 * LaneOfWarp();
    Quad g[kRowsAhead], h[kRowsAhead] = {};
#pragma unroll
    for (uint32_t i = 0; i < kRowsAhead; ++i) {
      g[i] = LoadQuadAs<kDtype, true>(job.gradient, start + base + i * kRow, 4);
      if constexpr (kMode != Mode::kNone) {
        h[i] = LoadResidual<true>(job.residual, start + base + i * kRow, 4);
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < kRowsAhead; ++i) {
      StoreHeld(CompensateQuad(job, kMode, g[i], h[i]), base + i * kRow, x, kept, kMode);
    }
  }
}

// A group into shared memory.
__device__ inline void Hold(const EncodeJob& job, uint32_t start, uint32_t count, float* x,
                            float* kept) {
  const uint32_t rows = job.aligned ? count / (kRowsAhead * kRow) * kRowsAhead : 0;
  WithDtype(job.dtype, [&](auto dtype) {
    constexpr int kDtype = decltype(dtype)::value;
    switch (job.mode) {
      case Mode::kNone:
        return HoldRows<kDtype, Mode::kNone>(job, start, rows, x, kept);
      case Mode::kShared:
        return HoldRows<kDtype, Mode::kShared>(job, start, rows, x, kept);
      default:
        return HoldRows<kDtype, Mode::kGeneral>(job, start, rows, x, kept);
    }
  });
  const FromTensor source = {start};
  for (uint32_t base = rows * kRow + 4 * LaneOfWarp(); base < count; base += kRow) {
    const uint32_t valid = ValidOf(base, count);
    const Compensated both = valid == 4 && job.aligned ? source.Load<true>(job, base, 4)
                                                       : source.Load<false>(job, base, valid);
    StoreHeld(both, base, x, kept, job.mode);
  }
}

template <StatsKind kKind>
__device__ inline GroupStats SumHeld(const float* x, uint32_t count) {
  ChunkTotals<kKind> totals;
  for (uint32_t start = 0, chunk = 0; start < count; start += kChunk, ++chunk) {
    const uint32_t size = count - start < kChunk ? count - start : kChunk;
    const GroupStats one = SumChunk<kKind>(size, [x, start](uint32_t i) { return x[start + i]; });
    if (count <= kChunk) return one;
    if (LaneOfSum() == chunk % kLanes) totals.Add(one);
  }
  return totals.Finish();
}

// The sums that this coder's scale is made from.
template <class C>
__device__ inline GroupStats StatsOf(const EncodeJob& job, const float* x, uint32_t count) {
  if constexpr (C::kType == CodeType::kBit) {
    return SumHeld<StatsKind::kSides>(x, count);
  } else if constexpr (C::kNoise) {
    constexpr StatsKind kKind =
        C::kPacking == Packing::kTrits ? StatsKind::kMoments : StatsKind::kSquares;
    if (KindOf(job.spec) == kKind) return SumHeld<kKind>(x, count);
  }
  return SumHeld<StatsKind::kLargest>(x, count);
}

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

// One pass over memory, a warp a group.
template <class C>
__global__ void __launch_bounds__(kThreads) EncodeHeld(const EncodeJob job) {
  const uint32_t group = job.spec.group;
  const bool general = job.mode == Mode::kGeneral;
  float* const x =
      reinterpret_cast<float*>(SharedMemory()) + WarpOfBlock() * group * (general ? 2 : 1);
  float* const kept = x + group;  // where the mode is general
  C coder(CoderSetup{&job.spec, job.workspace.tables + TableOf(job.spec)});
  Totals totals;
  const uint32_t warps = gridDim.x * (blockDim.x / kWarpSize);
  for (uint32_t index = blockIdx.x * (blockDim.x / kWarpSize) + WarpOfBlock();
       index < job.blocks.count; index += warps) {
    const uint32_t start = index * group;
    const uint32_t count = ElementsOfBlock(job.blocks, index);
    Hold(job, start, count, x, kept);
    __syncwarp();
    const GroupScale scale = ScaleOf(job.spec, StatsOf<C>(job, x, count), count);
    coder.SetGroup(scale);
    if (LaneOfWarp() == 0) StoreOwnScales<C>(job, index, scale, &totals);
    const Block<FromShared> block = {{x, kept, start}, CodesOfBlock(job.blocks, index), count};
    if constexpr (C::kPacking == Packing::kTrits) {
      const uint32_t words = WordsOfBlock(job.blocks, index);
      for (uint32_t base = 0; base < words; base += kWarpSize) {
        QuadEncoder<C>::Trits(job, coder, scale, block, base + LaneOfWarp(), words, &totals);
      }
    } else {
      for (uint32_t base = 0; base < count; base += kRow) {
        QuadEncoder<C>::Run(job, coder, scale, block, base + 4 * LaneOfWarp(), &totals);
      }
    }
    __syncwarp();
  }
  FinishPayload(job, totals);
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
template <class C>
__global__ void __launch_bounds__(kThreads) EncodeKnown(const EncodeJob job) {
  const Blocks& blocks = job.blocks;
  C coder(CoderSetup{&job.spec, job.workspace.tables + TableOf(job.spec)});
  const bool finite = C::kCast || !job.workspace.control->nonfinite;
  const bool own = IsContiguous(job.spec);
  GroupScale scale = {};
  if (blocks.count) scale = OpenGroup(job, 0, finite, &coder);
  QuadValues values;
  Totals totals;
  const auto block_at = [&](uint32_t index) {
    return Block<FromTensor>{
        {index * blocks.size}, CodesOfBlock(blocks, index), ElementsOfBlock(blocks, index)};
  };
  if constexpr (C::kPacking == Packing::kTrits) {
    const uint32_t all = blocks.count ? (blocks.count - 1) * blocks.words + blocks.last_words : 0;
    for (uint32_t first = WarpOfGrid() * kWarpSize; first < all; first += ThreadsOfGrid()) {
      // Past the end a thread only helps its neighbours.
      const uint32_t at = first + LaneOfWarp();
      const uint32_t index = at < all ? Quotient(blocks.by_words, at) : 0;
      if (own) scale = OpenGroup(job, index, finite, &coder);
      QuadEncoder<C>::Trits(job, coder, scale, block_at(index), at - index * blocks.words,
                            at < all ? WordsOfBlock(blocks, index) : 0, &totals);
    }
  } else {
    for (uint32_t first = WarpOfGrid() * kRow; first < blocks.elements;
         first += WarpsOfGrid() * kRow) {
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
      QuadEncoder<C>::Run(job, coder, scale, block_at(index), position, &totals);
    }
  }
  AddSharedScales(job, finite, &totals);
  FinishPayload(job, totals);
}

namespace {

int LaunchHeld(void (*kernel)(EncodeJob), const EncodeJob& job, cudaStream_t stream) {
  // What a block may have on every device without asking for more, less what the kernel itself
  // uses.
  constexpr uint32_t kShared = 47 << 10;
  const uint32_t each = 4 * job.spec.group * (job.mode == Mode::kGeneral ? 2 : 1);
  const uint32_t fit = kShared / each;
  const uint32_t warps = fit < kWarps ? fit : kWarps;
  return Launch(kernel, GridFor((job.layout.blocks + warps - 1) / warps), warps * kWarpSize,
                warps * each, stream, job);
}

int LaunchKnown(void (*kernel)(EncodeJob), const EncodeJob& job, cudaStream_t stream) {
  return Launch(kernel, GridFor(BlocksForQuads(job.layout.count)), kThreads, 0, stream, job);
}

template <class C>
int EncodeWith(const EncodeJob& job, cudaStream_t stream) {
  if constexpr (!C::kCast && !std::is_same<C, OneBitMatrixCoder<Thread>>::value) {
    if (job.passes.held) return LaunchHeld(EncodeHeld<C>, job, stream);
  }
  return LaunchKnown(EncodeKnown<C>, job, stream);
}

}  // namespace

int Encode(const EncodeJob& job, cudaStream_t stream) {
  return WithCoder(job.spec, [&](auto coder) {
    return EncodeWith<typename decltype(coder)::Type>(job, stream);
  });
}

}  // namespace HVDC_ARCH
}  // namespace hvdc
