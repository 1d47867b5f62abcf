// Encoding: groups that a warp can hold in one pass; everything else with scales that are known.
#define HVDC_ARCH device

#include "cuda/encode_quads.h"
#include "cuda/finish.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/sums.h"

namespace hvdc {
namespace HVDC_ARCH {

// Gradient and residual of a group into shared memory, as what is encoded. Four quads a thread are
// asked for before the first of them is used.
template <int kDtype>
__device__ inline void HoldAs(const EncodeJob& job, uint32_t start, uint32_t count, float* x,
                              float* kept) {
  constexpr int kAhead = 4;
  const bool feedback = job.mode != Mode::kNone;
  for (uint32_t base = 4 * LaneOfWarp(); base < count; base += 4 * kWarpSize * kAhead) {
    Quad g[kAhead], h[kAhead] = {};
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const uint32_t position = base + static_cast<uint32_t>(4 * kWarpSize * i);
      const uint32_t valid = ValidOf(position, count);
      if (!valid) continue;
      g[i] = LoadQuadAs<kDtype>(job.gradient, start + position, valid, job.aligned);
      if (feedback) {
        h[i] = LoadQuadAs<HVDC_DTYPE_FLOAT32>(job.residual, start + position, valid, job.aligned);
      }
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const uint32_t position = base + static_cast<uint32_t>(4 * kWarpSize * i);
      if (position >= count) continue;
      const Compensated both = CompensateQuad(job, g[i], h[i]);
      *reinterpret_cast<Quad*>(x + position) = both.x;
      if (kept != x) *reinterpret_cast<Quad*>(kept + position) = both.kept;
    }
  }
}

__device__ inline void Hold(const EncodeJob& job, uint32_t start, uint32_t count, float* x,
                            float* kept) {
  switch (job.dtype) {
    case HVDC_DTYPE_FLOAT32:
      return HoldAs<HVDC_DTYPE_FLOAT32>(job, start, count, x, kept);
    case HVDC_DTYPE_FLOAT16:
      return HoldAs<HVDC_DTYPE_FLOAT16>(job, start, count, x, kept);
    default:
      return HoldAs<HVDC_DTYPE_BFLOAT16>(job, start, count, x, kept);
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
__device__ inline void StoreOwnScales(const EncodeJob& job, int64_t block, const GroupScale& scale,
                                      Totals* totals) {
  const auto store = [&](int64_t index, float value) {
    const int64_t at = kHeaderBytes + 4 * index;
    *reinterpret_cast<float*>(job.payload + at) = value;
    totals->Word(FloatBits(value), at);
  };
  if constexpr (C::kType == CodeType::kBit) {
    store(block, scale.lower);
    store(job.layout.blocks + block, scale.upper);
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
  float* const kept = general ? x + group : x;
  C coder(CoderSetup{&job.spec, job.workspace.tables + TableOf(job.spec)});
  Totals totals;
  const uint32_t warps = gridDim.x * (blockDim.x / kWarpSize);
  for (int64_t index = blockIdx.x * (blockDim.x / kWarpSize) + WarpOfBlock();
       index < job.layout.blocks; index += warps) {
    const uint32_t start = static_cast<uint32_t>(index) * group;
    const uint32_t count = static_cast<uint32_t>(BlockElements(job.layout, index));
    Hold(job, start, count, x, kept);
    __syncwarp();
    const GroupScale scale = ScaleOf(job.spec, StatsOf<C>(job, x, count), count);
    coder.SetGroup(scale);
    if (LaneOfWarp() == 0) StoreOwnScales<C>(job, index, scale, &totals);
    const Block<FromShared> block = {{x, kept, start}, BlockOffset(job.layout, index), count};
    if constexpr (C::kPacking == Packing::kTrits) {
      const uint32_t words = static_cast<uint32_t>(TritBytes(count)) / 4;
      for (uint32_t word = LaneOfWarp(); word < words; word += kWarpSize) {
        QuadEncoder<C>::Trits(job, coder, scale, block, word, &totals);
      }
    } else {
      for (uint32_t base = 0; base < count; base += 4 * kWarpSize) {
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

// The scale of an element whose group was summed before this kernel, in the coder as well.
template <class C>
__device__ inline GroupScale OpenKnown(const EncodeJob& job, uint32_t block, uint32_t element,
                                       bool finite, QuadValues* values, C* coder) {
  GroupScale scale = {};
  scale.finite = scale.kept = true;
  if constexpr (std::is_same<C, OneBitMatrixCoder<Thread>>::value) {
    LoadMatrixValues(job.spec, job.payload, element, values->lower, values->upper);
    coder->lower = values->lower;
    coder->upper = values->upper;
    scale.finite = finite;
  } else if constexpr (!C::kCast) {
    scale = job.workspace.scales[job.spec.grouping == HVDC_CONTIGUOUS ? block : 0];
    coder->SetGroup(scale);
  }
  return scale;
}

// A quad a thread, or a word of trits, wherever it lies.
template <class C>
__global__ void __launch_bounds__(kThreads) EncodeKnown(const EncodeJob job) {
  const Layout& layout = job.layout;
  C coder(CoderSetup{&job.spec, job.workspace.tables + TableOf(job.spec)});
  const bool finite = !job.workspace.control->nonfinite;
  QuadValues values;
  Totals totals;
  const uint32_t size = static_cast<uint32_t>(layout.block);
  const auto block_at = [&](uint32_t index) {
    return Block<FromTensor>{{index * size},
                             BlockOffset(layout, index),
                             static_cast<uint32_t>(BlockElements(layout, index))};
  };
  if constexpr (C::kPacking == Packing::kTrits) {
    const uint32_t words = static_cast<uint32_t>(layout.block_bytes) / 4;
    const uint32_t all = static_cast<uint32_t>(layout.blocks - 1) * words +
                         static_cast<uint32_t>(layout.last_bytes) / 4;
    for (uint32_t word = ThreadOfGrid(); word < all; word += ThreadsOfGrid()) {
      const Block<FromTensor> block = block_at(word / words);
      const GroupScale scale =
          OpenKnown(job, word / words, block.source.start, finite, &values, &coder);
      QuadEncoder<C>::Trits(job, coder, scale, block, word % words, &totals);
    }
  } else {
    const uint32_t count = static_cast<uint32_t>(layout.count);
    const uint32_t spans = (count + 4 * kWarpSize - 1) / (4 * kWarpSize);
    for (uint32_t span = WarpOfGrid(); span < spans; span += WarpsOfGrid()) {
      const uint32_t element = 4 * (span * kWarpSize + LaneOfWarp());
      // Past the end a thread only helps its neighbours with their planes: those of the last tile,
      // or nobody with anything.
      const bool help = element / kTile * kTile < count;
      const uint32_t index = help ? element / size : 0;
      const Block<FromTensor> block = block_at(index);
      GroupScale scale = {};
      if (element < count) scale = OpenKnown(job, index, element, finite, &values, &coder);
      const uint32_t position = help ? element - index * size : size;
      QuadEncoder<C>::Run(job, coder, scale, block, position, &totals);
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
