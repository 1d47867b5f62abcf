// The entropy code: a payload with plain codes, which is complete, becomes a shorter one. Codes are
// counted, then coded, half a warp a chunk, then put where the chunks before them end.
#define HVDC_ARCH device

#include "cuda/codes.h"
#include "cuda/finish.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"

namespace hvdc {
namespace HVDC_ARCH {

// Run by the last block: the table of what all have counted, one thread for what goes code by code.
__device__ inline void MakeTable(const EncodeJob& job) {
  __shared__ uint32_t counts[kMaxAlphabet], shares[kMaxAlphabet], starts[kMaxAlphabet];
  __shared__ uint32_t present, most;
  for (uint32_t c = threadIdx.x; c < kMaxAlphabet; c += kThreads) {
    counts[c] = atomicExch(&job.workspace.counts[c], 0u);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    present = most = 0;
    for (uint32_t c = 0; c < kMaxAlphabet; ++c) {
      present += counts[c] > 0;
      if (counts[c] > counts[most]) most = c;
    }
  }
  __syncthreads();
  for (uint32_t c = threadIdx.x; c < kMaxAlphabet; c += kThreads) {
    shares[c] = RansShare(counts[c], job.blocks.elements, present);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32_t sum = 0;
    for (uint32_t c = 0; c < kMaxAlphabet; ++c) sum += shares[c];
    shares[most] += kRansTotal - sum;
    sum = 0;
    for (uint32_t c = 0; c < kMaxAlphabet; ++c) {
      starts[c] = sum;
      sum += shares[c];
    }
  }
  __syncthreads();
  for (uint32_t c = threadIdx.x; c < kMaxAlphabet; c += kThreads) {
    SetRansCode(job.workspace.table, static_cast<int>(c), shares[c], starts[c]);
  }
}

__global__ void __launch_bounds__(kThreads) CountPayload(const EncodeJob job) {
  __shared__ uint32_t counts[kMaxAlphabet];
  for (uint32_t c = threadIdx.x; c < kMaxAlphabet; c += kThreads) counts[c] = 0;
  __syncthreads();
  // Most codes are the one of level 0, which every thread counts for itself.
  const uint32_t zero = job.spec.codec == HVDC_ECQ ? job.spec.levels : 0;
  uint32_t zeros = 0;
  for (uint32_t i = ThreadOfGrid(); i < job.blocks.elements; i += ThreadsOfGrid()) {
    const uint32_t code = CodeAt(job.spec, job.blocks, job.payload, i);
    if (code == zero) {
      ++zeros;
    } else {
      atomicAdd(&counts[code], 1u);
    }
  }
  if (zeros) atomicAdd(&counts[zero], zeros);
  __syncthreads();
  for (uint32_t c = threadIdx.x; c < kMaxAlphabet; c += kThreads) {
    if (counts[c]) atomicAdd(&job.workspace.counts[c], counts[c]);
  }
  if (!LastBlock(job.workspace.control)) return;
  MakeTable(job);
  if (threadIdx.x == 0) job.workspace.control->tickets = 0;
}

// Of a chunk that has been coded, in units of four bytes.
__device__ inline uint32_t SizeOfChunk(const EncodeJob& job, uint32_t index) {
  const int lanes = RansLanes(ChunkElements(job.layout, index));
  return static_cast<uint32_t>(lanes) + (job.workspace.chunks[index].words + 1) / 2;
}

// Where a chunk's elements start, in the tensor and in the workspace's words.
__device__ inline uint32_t StartOfChunk(const EncodeJob& job, uint32_t index) {
  return index * static_cast<uint32_t>(job.layout.chunk) * job.blocks.size;
}

// Run by the last block: where chunks go, and whether the payload becomes shorter.
__device__ inline void PlaceChunks(const EncodeJob& job) {
  __shared__ uint32_t sums[kThreads];
  const uint32_t all = static_cast<uint32_t>(Chunks(job.layout));
  const uint32_t each = (all + kThreads - 1) / kThreads;
  const uint32_t first = threadIdx.x * each;
  const uint32_t last = first + each < all ? first + each : all;
  uint32_t sum = 0;
  for (uint32_t i = first; i < last; ++i) sum += SizeOfChunk(job, i);
  sums[threadIdx.x] = sum;
  __syncthreads();
  uint32_t place = 0;
  for (uint32_t i = 0; i < threadIdx.x; ++i) place += sums[i];
  for (uint32_t i = first; i < last; ++i) {
    job.workspace.chunks[i].place = place;
    place += SizeOfChunk(job, i);
  }
  if (threadIdx.x != kThreads - 1) return;
  Control* const control = job.workspace.control;
  const int64_t origin = job.layout.codes_offset + RansHeadBytes(job.spec, job.layout);
  const int64_t length = RansLength(job.layout, origin + int64_t{4} * place);
  control->length = static_cast<uint32_t>(length / kLengthUnit);
  control->tickets = 0;
}

__global__ void __launch_bounds__(kThreads) EncodeChunks(const EncodeJob job) {
  using Step = RansStep<Thread>;
  constexpr uint32_t kAhead = 4;  // rows whose codes are asked for before the first of them is used
  __shared__ RansEncodeTable table;
  for (uint32_t i = threadIdx.x; i < sizeof(table) / 4; i += kThreads) {
    reinterpret_cast<uint32_t*>(&table)[i] =
        reinterpret_cast<const uint32_t*>(job.workspace.table)[i];
  }
  __syncthreads();
  const uint32_t all = static_cast<uint32_t>(Chunks(job.layout));
  const uint32_t lane = LaneOfHalf();
  for (uint32_t first = 2 * WarpOfGrid(); first < all; first += 2 * WarpsOfGrid()) {
    const uint32_t index = first + HalfOfWarp();
    const uint32_t start = StartOfChunk(job, index);
    const uint32_t count =
        index < all ? static_cast<uint32_t>(ChunkElements(job.layout, index)) : 0;
    const uint32_t lanes = static_cast<uint32_t>(RansLanes(count));
    const uint32_t own = (count + lanes - 1) / lanes;
    const uint32_t other = __shfl_xor_sync(kFullWarp, own, kLanes, kWarpSize);
    const uint32_t rows = ((own > other ? own : other) + kAhead - 1) / kAhead * kAhead;
    // Words are written from the end of their room on, the last one first.
    uint16_t* const end = job.workspace.words + (count ? start + count : 0);
    uint32_t used = 0, x = kRansLower;
    for (uint32_t row = rows; row; row -= kAhead) {
      uint32_t codes[kAhead];
      bool here[kAhead];
#pragma unroll
      for (uint32_t i = 0; i < kAhead; ++i) {
        const uint32_t position = (row - 1 - i) * lanes + lane;
        here[i] = lane < lanes && position < count;
        codes[i] = here[i] ? CodeAt(job.spec, job.blocks, job.payload, start + position) : 0;
      }
#pragma unroll
      for (uint32_t i = 0; i < kAhead; ++i) {
        const uint32_t slots = table.slots[codes[i]];
        const bool full = here[i] && Step::Full(x, slots);
        const uint32_t ballot = HalfBallot(full);
        used += static_cast<uint32_t>(__popc(ballot));
        if (full) {
          const uint32_t before = static_cast<uint32_t>(__popc(ballot & ((1u << lane) - 1)));
          *(end - used + before) = static_cast<uint16_t>(x);
          x >>= kRansWord;
        }
        if (here[i]) {
          const float inverse = Thread::FromBits(table.inverse[codes[i]]);
          x = Step::Push(x, inverse, slots);
        }
      }
    }
    if (!count) continue;
    CodedChunk& chunk = job.workspace.chunks[index];
    if (lane < lanes) chunk.states[lane] = x;
    if (lane == 0) chunk.words = used;
  }
  if (!LastBlock(job.workspace.control)) return;
  PlaceChunks(job);
}

// What a payload holds from a chunk's start on, in words of four bytes.
__device__ inline uint32_t WordOfChunk(const EncodeJob& job, uint32_t index, uint32_t at) {
  const CodedChunk& chunk = job.workspace.chunks[index];
  const int64_t count = ChunkElements(job.layout, index);
  const uint32_t lanes = static_cast<uint32_t>(RansLanes(count));
  if (at < lanes) return chunk.states[at];
  const uint32_t pair = 2 * (at - lanes);
  const uint16_t* const words =
      job.workspace.words + StartOfChunk(job, index) + (count - chunk.words);
  const uint32_t second = pair + 1 < chunk.words ? words[pair + 1] : 0;
  return words[pair] | second << 16;
}

// Table or index, in words of four bytes.
__device__ inline uint32_t WordOfHead(const EncodeJob& job, uint32_t at) {
  const uint32_t table = static_cast<uint32_t>(RansTableBytes(job.spec) / 4);
  if (at >= table) return job.workspace.chunks[at - table + 1].place;
  const RansEncodeTable& codes = *job.workspace.table;
  return RansFrequency(codes, 2 * at) | RansFrequency(codes, 2 * at + 1) << 16;
}

// The entropy-coded payload in the place of the plain one.
__global__ void __launch_bounds__(kThreads) StoreCoded(const EncodeJob job) {
  Control* const control = job.workspace.control;
  const uint32_t length = control->length;
  if (!length) return;
  uint32_t* const payload = reinterpret_cast<uint32_t*>(job.payload);
  Totals totals;
  const auto store = [&](uint32_t index, uint32_t word) {
    payload[index] = word;
    totals.Word(word, index);
  };
  const uint32_t codes = job.blocks.codes;
  for (uint32_t i = kHeaderWords + ThreadOfGrid(); i < codes; i += ThreadsOfGrid()) {
    totals.Word(payload[i], i);
  }
  const uint32_t head = static_cast<uint32_t>(RansHeadBytes(job.spec, job.layout) / 4);
  for (uint32_t i = ThreadOfGrid(); i < head; i += ThreadsOfGrid()) {
    store(codes + i, WordOfHead(job, i));
  }
  const uint32_t all = static_cast<uint32_t>(Chunks(job.layout)), origin = codes + head;
  for (uint32_t index = blockIdx.x; index < all; index += gridDim.x) {
    const uint32_t size = SizeOfChunk(job, index);
    const uint32_t place = origin + job.workspace.chunks[index].place;
    for (uint32_t i = threadIdx.x; i < size; i += kThreads) {
      store(place + i, WordOfChunk(job, index, i));
    }
  }
  const uint32_t last = origin + job.workspace.chunks[all - 1].place + SizeOfChunk(job, all - 1);
  constexpr uint32_t kUnit = kLengthUnit / 4;
  for (uint32_t i = last + ThreadOfGrid(); i < length * kUnit; i += ThreadsOfGrid()) store(i, 0);
  AddTotals(control, totals);
  if (!LastBlock(control) || threadIdx.x) return;
  control->length = 0;
  // The plain payload's header is still there.
  Header header;
  memcpy(&header, job.payload, sizeof(header));
  StoreHeader(job, (header.flags & kFlagNonfinite) | kFlagCoded | length << kLengthShift);
}

int EncodeEntropy(const EncodeJob& job, cudaStream_t stream) {
  if (!job.layout.count) return HVDC_OK;
  int status = Launch(CountPayload, (job.layout.count + kThreads - 1) / kThreads, 0, stream, job);
  if (status != HVDC_OK) return status;
  const int64_t chunks = Chunks(job.layout);
  status = Launch(EncodeChunks, (chunks + 2 * kWarps - 1) / (2 * kWarps), 0, stream, job);
  return status == HVDC_OK ? Launch(StoreCoded, chunks, 0, stream, job) : status;
}

}  // namespace HVDC_ARCH
}  // namespace hvdc
