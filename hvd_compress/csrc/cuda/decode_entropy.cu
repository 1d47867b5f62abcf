// Entropy-coded codes to bit planes in the workspace, half a warp a chunk; from there they are
// decoded like plain ones. Payloads have been checked before, but for table and index.
#define HVDC_ARCH device

#include "cuda/codes.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/report.h"

namespace hvdc {
namespace HVDC_ARCH {

// What half a warp looks up for its chunk.
struct SlotTable {
  static constexpr uint32_t kSlots = 64;  // that have a guess together

  uint32_t sums[kLanes];
  uint16_t starts[kMaxAlphabet + 1];  // a code's slots end where the next one's begin
  uint8_t guess[kRansTotal / kSlots];

  // The code to which a slot belongs.
  __device__ uint32_t Find(uint32_t slot, uint32_t from) const {
    uint32_t code = from;
    while (starts[code + 1] <= slot) ++code;
    return code;
  }
  __device__ uint32_t Find(uint32_t slot) const { return Find(slot, guess[slot / kSlots]); }
};

// Of a payload's table; null: of none. Returns whether its frequencies have the right sum, without
// which nothing may be looked up. Called by all threads of a warp.
__device__ inline bool FillTable(const uint8_t* stored, uint32_t alphabet, SlotTable* table) {
  constexpr uint32_t kCodes = kMaxAlphabet / kLanes;  // of a thread
  const uint16_t* const frequencies = reinterpret_cast<const uint16_t*>(stored);
  const uint32_t lane = LaneOfHalf(), first = lane * kCodes;
  const auto frequency = [&](uint32_t code) {
    return stored && code < alphabet ? static_cast<uint32_t>(frequencies[code]) : 0;
  };
  uint32_t own = 0;
  for (uint32_t i = 0; i < kCodes; ++i) own += frequency(first + i);
  __syncwarp();  // the chunk before may still be looked up
  table->sums[lane] = own;
  __syncwarp();
  uint32_t start = 0, total = 0;
  for (uint32_t i = 0; i < kLanes; ++i) {
    if (i == lane) start = total;
    total += table->sums[i];
  }
  const bool right = total == kRansTotal;
  if (right) {
    for (uint32_t i = 0; i < kCodes; ++i) {
      table->starts[first + i] = static_cast<uint16_t>(start);
      start += frequency(first + i);
    }
    if (lane == kLanes - 1) table->starts[kMaxAlphabet] = kRansTotal;
  }
  __syncwarp();
  if (right) {
    constexpr uint32_t kGuesses = sizeof(table->guess) / kLanes;
    uint32_t code = 0;
    for (uint32_t i = lane * kGuesses; i < (lane + 1) * kGuesses; ++i) {
      code = table->Find(i * SlotTable::kSlots, code);
      table->guess[i] = static_cast<uint8_t>(code);
    }
  }
  __syncwarp();
  return right;
}

// The words of a chunk, of which the half warp has two rows at hand, so that the next one is on its
// way when it is needed. Behind the last word come zeros.
class WordWindow {
 public:
  __device__ WordWindow(const uint16_t* words, uint32_t count) : words_(words), count_(count) {
    first_ = Load(LaneOfHalf());
    second_ = Load(kLanes + LaneOfHalf());
  }

  // A word for each thread that wants one, in order. Called by all threads of a warp.
  __device__ uint32_t Take(bool wanted) {
    const uint32_t ballot = HalfBallot(wanted);
    const uint32_t at =
        offset_ + static_cast<uint32_t>(__popc(ballot & ((1u << LaneOfHalf()) - 1)));
    // Sixteen words from the offset on: those of the second row stand before it.
    const uint32_t own = LaneOfHalf() < offset_ ? second_ : first_;
    const uint32_t word = __shfl_sync(kFullWarp, own, static_cast<int>(at % kLanes), kLanes);
    offset_ += static_cast<uint32_t>(__popc(ballot));
    if (offset_ >= kLanes) {
      offset_ -= kLanes;
      begin_ += kLanes;
      first_ = second_;
      second_ = Load(begin_ + kLanes + LaneOfHalf());
    }
    return word;
  }

 private:
  __device__ uint32_t Load(uint32_t index) const { return index < count_ ? words_[index] : 0; }

  const uint16_t* const words_;
  const uint32_t count_;
  uint32_t begin_ = 0, offset_ = 0;  // of the first row, and of the next word in it
  uint32_t first_, second_;
};

// A chunk of one payload, or of none.
struct ChunkSource {
  const uint8_t* payload = nullptr;
  uint32_t start = 0, count = 0;  // elements
  bool coded = false;
  const uint8_t* table = nullptr;   // of a coded one that fits into its payload
  const uint8_t* states = nullptr;  // the same
  uint32_t words = 0;               // behind the states

  __device__ ChunkSource(const DecodeJob& job, uint32_t index, uint32_t chunks) {
    const uint32_t all = static_cast<uint32_t>(job.count) * chunks;
    if (index >= all) return;
    const uint32_t rank = index / chunks, chunk = index % chunks;
    payload = job.payloads + rank * job.stride;
    start = chunk * static_cast<uint32_t>(job.layout.chunk) * job.blocks.size;
    count = static_cast<uint32_t>(ChunkElements(job.layout, chunk));
    const uint32_t flags = FlagsOf(payload);
    coded = flags & kFlagCoded;
    if (!coded) return;
    const int64_t length = PayloadLength(job.spec, job.layout, flags);
    if (length < job.layout.codes_offset + RansHeadBytes(job.spec, job.layout)) return;
    table = payload + job.layout.codes_offset;
    const ChunkPlace place = FindChunk(job.spec, job.layout, payload, length, chunk);
    if (place.begin < 0) return;
    states = payload + place.begin;
    // An element takes one at the most.
    const int64_t left = (place.end - place.begin) / 2 - 2 * RansLanes(count);
    words = left < count ? static_cast<uint32_t>(left) : count;
  }
};

__global__ void __launch_bounds__(kThreads) UnpackChunks(const DecodeJob job) {
  using Step = RansStep<Thread>;
  __shared__ SlotTable tables[2 * kWarps];
  Control* const control = job.workspace.control;
  if (!control->sound) return;
  SlotTable* const table = &tables[threadIdx.x / kLanes];
  const uint32_t alphabet = static_cast<uint32_t>(Alphabet(job.spec));
  const uint32_t chunks = static_cast<uint32_t>(Chunks(job.layout));
  const uint32_t all = static_cast<uint32_t>(job.count) * chunks;
  const uint32_t planes = static_cast<uint32_t>(UnpackedPlanes(job.spec));
  const uint32_t lane = LaneOfHalf();
  for (uint32_t first = 2 * WarpOfGrid(); first < all; first += 2 * WarpsOfGrid()) {
    const uint32_t index = first + HalfOfWarp();
    const ChunkSource source(job, index, chunks);
    const bool right = FillTable(source.table, alphabet, table);
    const bool fits = !source.coded || (right && source.states);
    if (!fits && lane == 0) {
      atomicMax(&control->unfit, HVDC_CUDA_MAX_PAYLOADS - index / chunks);
    }
    const uint32_t count = fits ? source.count : 0;
    const uint32_t lanes = source.coded ? static_cast<uint32_t>(RansLanes(count)) : kLanes;
    const uint32_t own = (count + lanes - 1) / lanes;
    const uint32_t other = __shfl_xor_sync(kFullWarp, own, kLanes, kWarpSize);
    const uint32_t rows = own > other ? own : other;
    const bool coded = source.coded && fits;
    const uint32_t* const states = reinterpret_cast<const uint32_t*>(source.states);
    uint32_t x = coded && lane < lanes ? states[lane] : 0;
    WordWindow window(coded ? reinterpret_cast<const uint16_t*>(states + lanes) : nullptr,
                      coded ? source.words : 0);
    uint8_t* const to = job.workspace.unpacked +
                        index / chunks * UnpackedBytes(job.spec, job.layout) +
                        static_cast<int64_t>(source.start / kTile) * 8 * planes;
    uint32_t bits = 0;  // of the plane that has this thread's number
    for (uint32_t row = 0; row < rows; ++row) {
      const uint32_t begin = row * lanes, position = begin + lane;
      const bool here = lane < lanes && position < count;
      uint32_t code = 0, next = x;
      bool low = false;
      if (here && coded) {
        const uint32_t slot = x % kRansTotal;
        code = table->Find(slot);
        const uint32_t start = table->starts[code];
        next = Step::Pull(x, slot, table->starts[code + 1] - start, start);
        low = Step::Low(next);
      } else if (here) {
        code = CodeAt(job.spec, job.blocks, source.payload, source.start + position);
      }
      const uint32_t word = window.Take(low);
      x = low ? Step::TakeWord(next, word) : next;
      for (uint32_t plane = 0; plane < planes; ++plane) {
        const uint32_t ballot = HalfBallot(code >> plane & 1u);
        if (lane == plane) bits |= ballot << begin % kLanes;
      }
      if (begin >= count || ((begin + lanes) % kLanes && begin + lanes < count)) continue;
      // Sixteen elements of a plane, or what is left of them.
      if (lane < planes) {
        const uint32_t at = 4 * (begin / kTile * planes + lane) + begin % kTile / kLanes;
        reinterpret_cast<uint16_t*>(to)[at] = static_cast<uint16_t>(bits);
      }
      bits = 0;
    }
  }
  if (!LastBlock(control) || threadIdx.x) return;
  const uint32_t unfit = atomicExch(&control->unfit, 0u);
  control->tickets = 0;
  if (!unfit) return;
  control->sound = 0;
  Report(job, HVDC_BAD_CODES, static_cast<int32_t>(HVDC_CUDA_MAX_PAYLOADS - unfit));
}

int UnpackCodes(const DecodeJob& job, cudaStream_t stream) {
  const int64_t halves = job.count * Chunks(job.layout);
  return Launch(UnpackChunks, (halves + 2 * kWarps - 1) / (2 * kWarps), 0, stream, job);
}

}  // namespace HVDC_ARCH
}  // namespace hvdc
