// Top-k: a block of threads takes a chunk. What bounds encoding is the number of passes over the
// chunk in shared memory, three of which find the smallest magnitude that is sent, and, where many
// elements are sent, the sums that are added up one number after the other. Chunks of up to kTile
// elements cross the memory bus once; larger ones are read in tiles, six times, and chunks of a few
// hundred elements leave most of a block's work to its fixed costs.
#define HVDC_ARCH device

#include "codec/topk.h"
#include "cuda/batch.h"
#include "cuda/finish.h"
#include "cuda/held.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/payload_sums.h"

namespace hvdc {
namespace HVDC_ARCH {
namespace {

constexpr uint32_t kTileOfChunk = 4096;  // elements that a block holds at a time
constexpr uint32_t kRowsOfTile = kTileOfChunk / kWarpSize;
static_assert(kRowsOfTile == kThreads, "a thread has a row's bits");

// Bins of the first digits of magnitudes, in words of shared memory: one is left out after every
// sixteen, so that threads with sixteen bins each read different banks.
constexpr uint32_t kDigitBits = 11;
HVDC_HD uint32_t PlaceOfBin(uint32_t bin) { return bin + bin / 16; }
constexpr uint32_t kBinWords = (1u << kDigitBits) / 16 * 17;

HVDC_HD uint32_t Least(int64_t x, int64_t y) { return static_cast<uint32_t>(x < y ? x : y); }

// Elements that are held, and entries that a tile can have.
HVDC_HD uint32_t TileOf(const hvdc_spec& spec) { return Least(spec.group, kTileOfChunk); }
HVDC_HD uint32_t ListOf(const hvdc_spec& spec) { return Least(spec.levels, TileOf(spec)); }

// The sum of what the threads before this one bring, and that of all. Called by all threads of a
// block.
__device__ inline uint32_t SumBefore(uint32_t own, uint32_t* all) {
  __shared__ uint32_t warps[kWarps];
  uint32_t sum = own;
  for (uint32_t width = 1; width < kWarpSize; width *= 2) {
    const uint32_t other = __shfl_up_sync(kFullWarp, sum, width, kWarpSize);
    if (LaneOfWarp() >= width) sum += other;
  }
  __syncthreads();  // The sums of the call before have been read.
  if (LaneOfWarp() == kWarpSize - 1) warps[WarpOfBlock()] = sum;
  __syncthreads();
  uint32_t before = sum - own, total = 0;
#pragma unroll
  for (uint32_t warp = 0; warp < kWarps; ++warp) {
    if (warp < WarpOfBlock()) before += warps[warp];
    total += warps[warp];
  }
  *all = total;
  return before;
}

// The largest of what all threads of a block bring.
__device__ inline uint32_t LargestOfBlock(uint32_t own) {
  __shared__ uint32_t largest;
  if (threadIdx.x == 0) largest = 0;
  __syncthreads();
  for (int width = kWarpSize / 2; width; width /= 2) {
    const uint32_t other = __shfl_xor_sync(kFullWarp, own, width, kWarpSize);
    own = own < other ? other : own;
  }
  if (LaneOfWarp() == 0) atomicMax(&largest, own);
  __syncthreads();
  return largest;
}

__device__ inline float Magnitude(float x) { return BitsFloat(FloatBits(x) & 0x7FFFFFFFu); }

// Elements of a tile, to shared memory, when the one before is no longer needed.
template <int kResidual>
__device__ HVDC_NOINLINE void HoldTile(const EncodeJob& job, float* x, uint32_t start,
                                       uint32_t size) {
  __syncthreads();
  Hold<kResidual>(job, Team(x), start, size);
  __syncthreads();
}

// The elements of a chunk that are sent: those whose magnitude's bits are above least, and the
// first ones that are equal to it.
struct Cut {
  uint32_t least, equal;
};

// A chunk that is encoded. kResidual: the dtype of residuals.
template <int kResidual>
class ChunkEncoder {
 public:
  __device__ ChunkEncoder(const EncodeJob& encoded, uint32_t block)
      : job(encoded),
        format(encoded.spec),
        index(block),
        start(block * encoded.blocks.size),
        count(ElementsOfBlock(encoded.blocks, block)),
        held(false),
        marked(false),
        entries(0),
        x(reinterpret_cast<float*>(SharedMemory())),
        bins(reinterpret_cast<uint32_t*>(x) + TileOf(encoded.spec)),
        list(bins) {}

  __device__ void Run(Totals* totals) {
    uint32_t largest;
    uint32_t keep = static_cast<uint32_t>(TopKKept(job.spec, count));
    Cut cut = {0, keep};
    FindDigit<20, kDigitBits>(&cut, &largest);
    const bool finite = largest < kInfinityBits;
    const bool sent = finite && (format.floats() || BitsFloat(largest) >= kTiny);
    float unit = finite ? 0.0f : BitsFloat(kNanBits);
    float divisor = 1;
    if (sent) {
      FindDigit<10, 10>(&cut, nullptr);
      FindDigit<0, 10>(&cut, nullptr);
      if (cut.least == 0) cut.equal = 0;  // Zeros are not sent.
      unit = format.floats() ? 1.0f : Fit(cut, BitsFloat(largest), &divisor);
    } else {
      cut = {~0u, 0};
    }
    if (threadIdx.x == 0) {
      if (!finite) totals->nonfinite = true;
      ScalesOf(job.payload)[index] = unit;
      totals->Word(FloatBits(unit), kHeaderWords + index);
    }
    Store(cut, finite, unit, divisor, totals);
    __syncthreads();
  }

 private:
  // Calls work(first, size) for every tile of the chunk, which is then held in x. A chunk of one
  // tile stays there.
  template <class Work>
  __device__ void EachTile(const Work& work) {
    for (uint32_t first = 0; first < count; first += kTileOfChunk) {
      const uint32_t size = Least(count - first, kTileOfChunk);
      if (!held) HoldTile<kResidual>(job, x, start + first, size);
      work(first, size);
    }
    held = count <= kTileOfChunk;
  }

  __device__ uint32_t KeyOf(uint32_t i) const { return FloatBits(x[i]) & 0x7FFFFFFFu; }

  // The next digit of magnitude number cut->equal among those that begin with the digits in
  // cut->least, the largest first; cut->equal becomes its number among those that have this digit,
  // too. largest: the largest magnitude is wanted.
  template <uint32_t kShift, uint32_t kBits>
  __device__ void FindDigit(Cut* cut, uint32_t* largest) {
    __shared__ Cut next;
    constexpr uint32_t kEach = (1u << kBits) / kThreads;
    for (uint32_t i = threadIdx.x; i < kBinWords; i += kThreads) bins[i] = 0;
    __syncthreads();
    uint32_t most = 0;
    EachTile([&](uint32_t, uint32_t size) {
      for (uint32_t i = threadIdx.x; i < size; i += kThreads) {
        const uint32_t key = KeyOf(i);
        if (largest) most = most < key ? key : most;
        if ((key ^ cut->least) >> (kShift + kBits)) continue;
        atomicAdd(&bins[PlaceOfBin(key >> kShift & ((1u << kBits) - 1))], 1u);
      }
    });
    if (largest) *largest = LargestOfBlock(most);
    __syncthreads();
    // A thread has some neighbouring bins; the first thread has the topmost.
    const uint32_t top = (kThreads - threadIdx.x) * kEach - 1;
    uint32_t own = 0, all;
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) own += bins[PlaceOfBin(top - i)];
    uint32_t before = SumBefore(own, &all);
    if (before < cut->equal && cut->equal <= before + own) {
      uint32_t bin = top;
      for (; before + bins[PlaceOfBin(bin)] < cut->equal; --bin) before += bins[PlaceOfBin(bin)];
      next = {cut->least | bin << kShift, cut->equal - before};
    }
    __syncthreads();
    *cut = next;
    __syncthreads();
  }

  // Marks the elements of a tile that are sent, a bit each in rows, lists their places, and returns
  // how many they are. ties: how many that are equal to the least may still be sent.
  __device__ uint32_t Mark(uint32_t size, uint32_t least, uint32_t* ties) const {
    __shared__ uint32_t equals[kRowsOfTile];
    __syncthreads();
    for (uint32_t row = WarpOfBlock(); row < kRowsOfTile; row += kWarps) {
      uint32_t above = 0, equal = 0;
      if (row * kWarpSize < size) {
        const uint32_t i = row * kWarpSize + LaneOfWarp();
        const uint32_t key = i < size ? KeyOf(i) : 0;
        above = __ballot_sync(kFullWarp, i < size && key > least);
        equal = __ballot_sync(kFullWarp, i < size && key == least);
      }
      if (LaneOfWarp() == 0) {
        Rows()[row] = above;
        equals[row] = equal;
      }
    }
    __syncthreads();
    uint32_t all;
    uint32_t equal = equals[threadIdx.x];
    const uint32_t before = SumBefore(static_cast<uint32_t>(__popc(equal)), &all);
    const uint32_t rest = *ties > before ? *ties - before : 0;
    while (static_cast<uint32_t>(__popc(equal)) > rest) equal &= ~(0x80000000u >> __clz(equal));
    *ties -= Least(*ties, all);
    uint32_t sent = Rows()[threadIdx.x] | equal;
    Rows()[threadIdx.x] = sent;
    uint32_t at = SumBefore(static_cast<uint32_t>(__popc(sent)), &all);
    for (; sent; sent &= sent - 1) {
      list[at++] = threadIdx.x * kWarpSize + static_cast<uint32_t>(__ffs(sent)) - 1;
    }
    __syncthreads();
    return all;
  }

  __device__ static uint32_t* Rows() {
    __shared__ uint32_t rows[kRowsOfTile];
    return rows;
  }

  // Calls work(first, size, number) as EachTile does, when the number of a tile's entries is known.
  template <class Work>
  __device__ void EachMarkedTile(const Cut& cut, const Work& work) {
    uint32_t ties = cut.equal;
    EachTile([&](uint32_t first, uint32_t size) {
      if (!held || !marked) entries = Mark(size, cut.least, &ties);
      marked = true;
      work(first, size, entries);
    });
  }

  // The multiple of the unit that a magnitude is closest to.
  __device__ uint32_t Multiple(float magnitude, float divisor) const {
    const float quotient = Thread::Div(magnitude, divisor);
    return Thread::Round(Thread::Min(Thread::Max(quotient, 1.0f), format.top));
  }

  // The unit that fits what is sent, and what magnitudes are divided by to find their multiples.
  __device__ float Fit(const Cut& cut, float largest, float* divisor) {
    __shared__ double sums[2];
    __shared__ int64_t squares[2];
    double sum = 0;
    uint32_t all = 0;
    EachMarkedTile(cut, [&](uint32_t, uint32_t, uint32_t number) {
      all += number;
      if (threadIdx.x) return;
#pragma unroll 8
      for (uint32_t e = 0; e < number; ++e) sum = Thread::AddWide(sum, Magnitude(x[list[e]]));
    });
    if (threadIdx.x == 0) sums[0] = sum;
    __syncthreads();
    const float tries[2] = {
        Thread::Div(largest, format.top),
        static_cast<float>(sums[0] / (static_cast<double>(all) * format.middle()))};
    // A thread of the first two warps adds up what one of the two comes to.
    const uint32_t one = WarpOfBlock();
    const bool adds = one < 2 && LaneOfWarp() == 0;
    TopKFit fit = {0, 0};
    EachMarkedTile(cut, [&](uint32_t, uint32_t, uint32_t number) {
      for (uint32_t e = threadIdx.x; e < number; e += kThreads) {
        const float magnitude = Magnitude(x[list[e]]);
        list[e] |= Multiple(magnitude, tries[0]) << 16 | Multiple(magnitude, tries[1]) << 24;
      }
      __syncthreads();
      if (adds) {
#pragma unroll 8
        for (uint32_t e = 0; e < number; ++e) {
          const uint32_t multiple = list[e] >> (16 + 8 * one) & 0xFFu;
          const double magnitude = static_cast<double>(Magnitude(x[list[e] & 0xFFFFu]));
          fit.products = Thread::AddD(fit.products, __dmul_rn(magnitude, multiple));
          fit.squares += multiple * multiple;
        }
      }
      __syncthreads();
      // The next pass expects positions alone.
      for (uint32_t e = threadIdx.x; e < number; e += kThreads) list[e] &= 0xFFFFu;
    });
    if (adds) {
      sums[one] = fit.products;
      squares[one] = fit.squares;
    }
    __syncthreads();
    const TopKFit fits[2] = {{sums[0], squares[0]}, {sums[1], squares[1]}};
    const int better = fits[1].gain() > fits[0].gain() ? 1 : 0;
    *divisor = tries[better];
    return format.Unit(fits[better]);
  }

  __device__ uint32_t CodeOf(float number, float divisor) const {
    if (format.floats()) return FloatBits(number);
    return format.Code(Multiple(Magnitude(number), divisor), FloatBits(number) >> 31);
  }

  // Entries and the next residual.
  __device__ void Store(const Cut& cut, bool finite, float unit, float divisor, Totals* totals) {
    __shared__ uint32_t carry;
    const uint32_t width = static_cast<uint32_t>(format.index_bits + format.value_bits);
    const uint32_t words = WordsOfBlock(job.blocks, index);
    const uint32_t codes = CodesOfBlock(job.blocks, index);
    uint32_t* const to = job.payload.As<uint32_t>();
    uint32_t rank = 0;  // of the tile's first entry
    if (threadIdx.x == 0) carry = 0;
    EachMarkedTile(cut, [&](uint32_t first, uint32_t size, uint32_t number) {
      __syncthreads();
      const uint32_t begin = rank * width / 32, end = (rank + number) * width / 32;
      // The word's bits that this tile's entries and those before have.
      const auto word_at = [&](uint32_t word) {
        uint32_t bits = word == begin ? carry : 0;
        uint32_t entry = 32 * word / width;
        if (entry < rank) entry = rank;
        for (; entry < rank + number && entry * width < 32 * word + 32; ++entry) {
          const uint32_t place = list[entry - rank];
          const uint64_t both = (first + place) | static_cast<uint64_t>(CodeOf(x[place], divisor))
                                                      << format.index_bits;
          const int shift = static_cast<int>(entry * width - 32 * word);
          bits |= static_cast<uint32_t>(shift < 0 ? both >> -shift : both << shift);
        }
        return bits;
      };
      const bool last = first + size == count;
      for (uint32_t word = begin + threadIdx.x; word < (last ? words : end); word += kThreads) {
        const uint32_t bits = word_at(word);
        to[codes + word] = bits;
        totals->Word(bits, codes + word);
      }
      uint32_t rest = 0;
      if (threadIdx.x == 0 && !last) rest = word_at(end);
      __syncthreads();
      if (threadIdx.x == 0) carry = rest;
      rank += number;
      if (job.mode != Mode::kNone) StoreResiduals(first, size, finite, unit, divisor);
    });
  }

  __device__ void StoreResiduals(uint32_t first, uint32_t size, bool finite, float unit,
                                 float divisor) const {
    const FromTensor<kResidual> source = {start};
    for (uint32_t row = WarpOfBlock() * kRow; row < size; row += kWarps * kRow) {
      const uint32_t i = row + 4 * LaneOfWarp(), valid = ValidOf(i, size);
      const QuadNoise noise = NoiseOf<false, kResidual>(job.noise, start + first + i, true);
      if (!valid) continue;
      const uint32_t sent = Rows()[i / kWarpSize] >> i % kWarpSize;
      const auto store = [&](auto whole) {
        constexpr bool kWhole = decltype(whole)::value;
        Quad rest;
        if (!finite) {
          rest = LoadQuadAs<kResidual, kWhole>(job.residual, start + first + i, valid);
        } else if (job.mode == Mode::kShared) {
          rest = *reinterpret_cast<const Quad*>(x + i);
        } else {
          rest = source.template Load<kWhole>(job, first + i, valid).kept;
        }
#pragma unroll
        for (uint32_t k = 0; k < 4; ++k) {
          if (!(sent >> k & 1)) continue;
          const float decoded = format.Value(CodeOf(x[i + k], divisor), unit);
          rest.v[k] = Thread::Sub(rest.v[k], decoded);
        }
        StoreResidual<kResidual, kWhole>(job.next_residual, start + first + i, valid, rest,
                                         noise.rounding);
      };
      if (valid == 4 && job.aligned) {
        store(std::true_type());
      } else {
        store(std::false_type());
      }
    }
  }

  const EncodeJob& job;
  const TopKFormat format;
  const uint32_t index, start, count;
  bool held, marked;  // whether x has all of the chunk, and list its entries
  uint32_t entries;   // of the tile in x
  float* const x;
  uint32_t* const bins;
  uint32_t* const list;  // in the place of the bins: places in the tile
};

template <int kResidual>
__global__ void __launch_bounds__(kThreads) EncodeTopK(const __grid_constant__ EncodeBatch batch) {
  Place place;
  const EncodeJob& job = batch.Open(&place);
  Totals totals;
  for (uint32_t block = place.block; block < job.blocks.count; block += place.blocks) {
    ChunkEncoder<kResidual>(job, block).Run(&totals);
  }
  FinishPayload(job, place, totals);
}

// Words of payloads that a block of threads holds at a time, scales included.
constexpr uint32_t kStageWords = 1024;

// Elements whose sums a block of threads has at a time, so that they and the checksums of as many
// payloads fit into shared memory.
HVDC_HD uint32_t SumsOf(const hvdc_spec& spec, int32_t payloads) {
  return Least(spec.group, payloads <= 512 ? kTileOfChunk : kTileOfChunk / 2);
}

// A chunk that is decoded.
class ChunkDecoder {
 public:
  __device__ ChunkDecoder(const DecodeJob& decoded, const PayloadSums& checksums, uint32_t block)
      : job(decoded),
        sums(checksums),
        format(decoded.spec),
        index(block),
        count(ElementsOfBlock(decoded.blocks, block)),
        keep(static_cast<uint32_t>(TopKKept(decoded.spec, count))),
        width(static_cast<uint32_t>(format.index_bits + format.value_bits)),
        words(WordsOfBlock(decoded.blocks, block)),
        x(reinterpret_cast<float*>(checksums.sums + decoded.count * kWarps)),
        stage(reinterpret_cast<uint32_t*>(x) + SumsOf(decoded.spec, decoded.count)) {}

  __device__ void Run() const {
    const uint32_t most = SumsOf(job.spec, job.count);
    for (uint32_t first = 0; first < count; first += most) {
      const uint32_t size = Least(count - first, most);
      __syncthreads();
      for (uint32_t i = threadIdx.x; i < size; i += kThreads) x[i] = 0;
      AddAll(first, size);
      __syncthreads();
      Store(first, size);
    }
  }

 private:
  // Payloads by turns: as many as the stage holds, or one in parts of 32 entries.
  __device__ void AddAll(uint32_t first, uint32_t size) const {
    const bool whole = words + 1 <= kStageWords;
    const uint32_t part = whole ? words : (kStageWords - 1) / width * width;
    const int32_t group = whole ? static_cast<int32_t>(kStageWords / (words + 1)) : 1;
    for (int32_t payload = 0; payload < job.count; payload += group) {
      const int32_t number = job.count - payload < group ? job.count - payload : group;
      for (uint32_t begin = 0; begin < words; begin += part) {
        const uint32_t taken = Least(words - begin, part);
        const uint32_t entry = begin / width * 32;
        const uint32_t last = begin + taken == words ? keep : entry + taken / width * 32;
        __syncthreads();
        Stage(payload, number, begin, taken, first == 0);
        __syncthreads();
        for (int32_t k = 0; k < number; ++k) {
          const uint32_t* const from = stage + static_cast<uint32_t>(k) * (taken + 1);
          Add(payload + k, from, begin, entry, last, first, size);
          __syncthreads();
        }
      }
    }
  }

  __device__ const uint32_t* PayloadOf(int32_t payload) const {
    return reinterpret_cast<const uint32_t*>(job.payloads + payload * job.stride);
  }

  // Copies some payloads' words, behind the scale of each, and adds them to the checksums once. A
  // warp takes a payload, or all of them a single one.
  __device__ void Stage(int32_t payload, int32_t number, uint32_t begin, uint32_t taken,
                        bool adds) const {
    const bool apart = number > 1;
    const uint32_t codes = CodesOfBlock(job.blocks, index) + begin;
#pragma unroll 4
    for (int32_t k = apart ? static_cast<int32_t>(WarpOfBlock()) : 0; k < number;
         k += apart ? kWarps : 1) {
      const uint32_t* const from = PayloadOf(payload + k);
      uint32_t* const to = stage + static_cast<uint32_t>(k) * (taken + 1);
      const uint32_t own = apart ? LaneOfWarp() : threadIdx.x;
      Totals totals;
      if (own == 0) to[0] = from[kHeaderWords + index];
      for (uint32_t i = own; i < taken; i += apart ? kWarpSize : kThreads) {
        const uint32_t word = from[codes + i];
        to[1 + i] = word;
        totals.Word(word, codes + i);
      }
      if (adds) sums.Add<1>(payload + k, &totals.checksum);
    }
  }

  // An entry at a bit of some words.
  __device__ uint64_t Entry(const uint32_t* from, uint32_t bit) const {
    const uint32_t shift = bit % 32;
    from += bit / 32;
    uint64_t bits = from[0] >> shift;
    if (shift + width > 32) bits |= static_cast<uint64_t>(from[1]) << (32 - shift);
    if (shift + width > 64) bits |= static_cast<uint64_t>(from[2]) << (64 - shift);
    return bits & ((uint64_t{1} << width) - 1);
  }

  // Adds entries [entry, last) of a payload, from the words that are staged from begin on. Indices
  // of a payload ascend, so that no two threads have the same one; or else the result is of no use.
  __device__ void Add(int32_t payload, const uint32_t* staged, uint32_t begin, uint32_t entry,
                      uint32_t last, uint32_t first, uint32_t size) const {
    const float unit = BitsFloat(staged[0]);
    const uint32_t mask = (1u << format.index_bits) - 1;
    bool fits = true;
    for (uint32_t e = entry + threadIdx.x; e < last; e += kThreads) {
      const uint64_t own = Entry(staged + 1, e * width - 32 * begin);
      if (e && !own) continue;  // not used
      const uint32_t place = static_cast<uint32_t>(own) & mask;
      fits = fits && place < count;
      if (e && first == 0) {
        // The one before is in the part before where this is the first.
        const uint64_t before =
            e == entry
                ? Entry(PayloadOf(payload) + CodesOfBlock(job.blocks, index), (e - 1) * width)
                : Entry(staged + 1, (e - 1) * width - 32 * begin);
        const bool used = e == 1 || before;
        fits = fits && used && (static_cast<uint32_t>(before) & mask) < place;
      }
      if (place - first < size) {
        const uint32_t code = static_cast<uint32_t>(own >> format.index_bits);
        x[place - first] = Thread::Add(x[place - first], format.Value(code, unit));
      }
    }
    if (!fits) {
      atomicMax(&job.workspace.control->wrong, static_cast<uint32_t>(job.count - payload));
    }
    if (unit != unit && entry == 0) {
      __syncthreads();
      for (uint32_t i = threadIdx.x; i < size; i += kThreads) x[i] = unit;
    }
  }

  __device__ void Store(uint32_t first, uint32_t size) const {
    const uint32_t start = index * job.blocks.size + first;
    WithDtype(job.dtype, [&](auto dtype) {
      constexpr int kDtype = decltype(dtype)::value;
      for (uint32_t i = 4 * threadIdx.x; i < size; i += 4 * kThreads) {
        const Quad* const quad = reinterpret_cast<const Quad*>(x + i);
        if (job.aligned && size - i >= 4) {
          StoreSums<kDtype, true, 1>(job, start + i, 4, quad);
        } else {
          StoreSums<kDtype, false, 1>(job, start + i, ValidOf(i, size), quad);
        }
      }
    });
  }

  const DecodeJob& job;
  const PayloadSums& sums;
  const TopKFormat format;
  const uint32_t index, count, keep, width, words;
  float* const x;
  uint32_t* const stage;
};

__global__ void __launch_bounds__(kThreads) DecodeTopK(const __grid_constant__ DecodeBatch batch) {
  Place place;
  const DecodeJob& job = batch.Open(&place);
  const PayloadSums sums(job);
  for (uint32_t block = place.block; block < job.blocks.count; block += place.blocks) {
    ChunkDecoder(job, sums, block).Run();
  }
  FinishDecoding(job, place, sums);
}

}  // namespace

Work<EncodeBatch> TopKEncodeWork(const EncodeJob& job) {
  const uint32_t list = ListOf(job.spec);
  const size_t words = TileOf(job.spec) + (list < kBinWords ? kBinWords : list);
  return WithResidual(job, [&](auto residual) -> Work<EncodeBatch> {
    return {EncodeTopK<decltype(residual)::value>, job.layout.blocks, words * sizeof(uint32_t)};
  });
}

Work<DecodeBatch> TopKDecodeWork(const DecodeJob& job) {
  const size_t words = SumsOf(job.spec, job.count) + kStageWords;
  return {DecodeTopK, job.layout.blocks, PayloadSums::Bytes(job.count) + words * sizeof(uint32_t)};
}

}  // namespace HVDC_ARCH
}  // namespace hvdc
