// Decoding: all payloads in one pass, their checksums taken on the way and looked at by the last
// block.
#define HVDC_ARCH device

#include "codec/header.h"
#include "cuda/batch.h"
#include "cuda/decode_quads.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/report.h"

namespace hvdc {
namespace HVDC_ARCH {

// The sums for each payload, in shared memory: of every thread of the block, or of every warp where
// there are many payloads.
struct PayloadSums {
  HVDC_HD static int32_t Slots(int32_t payloads) { return payloads <= 16 ? kThreads : kWarps; }

  __device__ PayloadSums(const DecodeJob& job)
      : sums(reinterpret_cast<unsigned long long*>(SharedMemory())),
        payloads(job.count),
        slots(Slots(job.count)) {
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < slots * payloads; i += kThreads) {
      sums[i] = 0;
    }
    __syncthreads();
  }

  // Called by all threads of a warp.
  __device__ void Add(int32_t payload, const Totals& totals) const {
    unsigned long long* const own = sums + payload * slots;
    if (slots == kThreads) {
      own[threadIdx.x] += totals.checksum;
      return;
    }
    const unsigned long long sum = WarpSum(totals.checksum);
    if (LaneOfWarp() == 0) own[WarpOfBlock()] += sum;
  }

  // Called by all threads of a block.
  __device__ void Finish(unsigned long long* all) const {
    __syncthreads();
    for (int32_t k = static_cast<int32_t>(WarpOfBlock()); k < payloads; k += kWarps) {
      unsigned long long sum = 0;
      for (int32_t i = static_cast<int32_t>(LaneOfWarp()); i < slots; i += kWarpSize) {
        sum += sums[k * slots + i];
      }
      sum = WarpSum(sum);
      if (LaneOfWarp() == 0 && sum) atomicAdd(&all[k], sum);
    }
  }

  unsigned long long* sums;
  int32_t payloads, slots;
};

// The words that quads do not add: header, scales, padding.
__device__ inline void AddRest(const DecodeJob& job, const Place& place, const PayloadSums& sums) {
  const Blocks& blocks = job.blocks;
  const uint32_t header = kHeaderWords - 2;  // the rest of it is the checksum
  const uint32_t before = blocks.codes - 2;
  const uint32_t words = static_cast<uint32_t>(job.layout.payload_bytes / 4);
  uint32_t end = words;
  if (blocks.count) {
    // As far as quads reach: casts' are two words and four.
    const uint32_t quad = job.spec.codec == HVDC_FP32 ? 4 : IsCast(job.spec) ? 2 : 1;
    end = CodesOfBlock(blocks, blocks.count - 1) + (blocks.last_words + quad - 1) / quad * quad;
  }
  const uint32_t all = before + (words - end);
  // Whole warps at a time, so that their sums can be taken.
  for (uint32_t first = place.Warp() * kWarpSize; first < all; first += place.Threads()) {
    const uint32_t i = first + LaneOfWarp();
    const uint32_t at = i < header ? i : i < before ? i + 2 : end + (i - before);
    for (int32_t k = 0; k < job.count; ++k) {
      Totals totals;
      if (i < all) {
        totals.Word(reinterpret_cast<const uint32_t*>(job.payloads + k * job.stride)[at], at);
      }
      sums.Add(k, totals);
    }
  }
}

// Run by the last block: what is wrong with the payloads, if anything, is recorded, and so is
// whether the result is not finite: by what their headers say, or because of a payload that is
// wrong. Returns whether all are right.
__device__ inline bool Verify(const DecodeJob& job) {
  __shared__ uint32_t worst;  // eight times a payload's index, plus its status
  if (threadIdx.x == 0) worst = ~0u;
  __syncthreads();
  for (int32_t k = static_cast<int32_t>(threadIdx.x); k < job.count; k += kThreads) {
    Header header;
    memcpy(&header, job.payloads + k * job.stride, sizeof(header));
    const unsigned long long sum = atomicExch(&job.workspace.checksums[k], 0ull);
    uint32_t status = HVDC_OK;
    if (sum != header.checksum) status = HVDC_BAD_CHECKSUM;
    if (!HeaderFits(job.spec, job.layout, job.step, header)) status = HVDC_BAD_HEADER;
    const bool finite = status == HVDC_OK && !(header.flags & kFlagNonfinite);
    if (job.flags && !finite) atomicOr(job.flags, kFlagNonfinite);
    if (status != HVDC_OK) atomicMin(&worst, 8 * static_cast<uint32_t>(k) + status);
  }
  __syncthreads();
  const uint32_t found = worst;
  if (threadIdx.x == 0) {
    atomicExch(&job.workspace.control->tickets, 0u);
    Report(job, found);
  }
  return found == ~0u;
}

__device__ inline void FillWithNan(const DecodeJob& job) {
  Quad nan;
#pragma unroll
  for (int k = 0; k < 4; ++k) nan.v[k] = BitsFloat(kNanBits);
  const uint32_t count = job.blocks.elements;
  WithDtype(job.dtype, [&](auto dtype) {
    for (uint32_t at = 4 * threadIdx.x; at < count; at += 4 * kThreads) {
      StoreQuadAs<decltype(dtype)::value, false>(job.out, at, ValidOf(at, count), nan);
    }
  });
}

// The thread's quads of neighbouring rows: what has to be read for all of them is asked for before
// the first of it is used.
template <int kDtype, bool kWhole, int kQuads>
__device__ inline void StoreSums(const DecodeJob& job, uint32_t element, uint32_t valid,
                                 const Quad* sums) {
  Quad before[kQuads];
  if (job.accumulate) {
#pragma unroll
    for (uint32_t i = 0; i < kQuads; ++i) {
      before[i] = LoadQuadAs<kDtype, kWhole>(job.out, element + i * kRow, valid);
    }
  }
#pragma unroll
  for (uint32_t i = 0; i < kQuads; ++i) {
    Quad after;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      after.v[k] = Thread::Mul(sums[i].v[k], job.scale);
      if (job.accumulate) after.v[k] = Thread::Add(before[i].v[k], after.v[k]);
    }
    StoreQuadAs<kDtype, kWhole>(job.out, element + i * kRow, valid, after);
  }
}

// kQuads rows of a warp from an element on, of one payload after the other. kWhole: all of their
// elements exist, and the tensors are aligned to four.
template <class C, bool kWhole, int kQuads>
__device__ inline void DecodeRows(const DecodeJob& job, const C& coder, const PayloadSums& sums,
                                  uint32_t first) {
  using Decoder = QuadDecoder<C, kWhole>;
  const uint32_t element = first + 4 * LaneOfWarp();
  const auto place_of = [&](int i) {
    return QuadPlace<C, kWhole>(job.blocks, element + static_cast<uint32_t>(i) * kRow);
  };
  Quad total[kQuads] = {};
  Codes codes[kQuads];
  const auto read = [&](int32_t payload) {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      codes[i] = Decoder::Read(job, payload, place_of(i));
    }
  };
  if (job.count) read(0);
  for (int32_t payload = 0; payload < job.count; ++payload) {
    const uint8_t* const bytes = job.payloads + payload * job.stride;
    Codes now[kQuads];
#pragma unroll
    for (int i = 0; i < kQuads; ++i) now[i] = codes[i];
    // The next payload's are on their way while this one's are decoded.
    if (payload + 1 < job.count) read(payload + 1);
    Totals totals;
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const QuadPlace<C, kWhole> place = place_of(i);
      Decoder::Count(place, now[i], &totals);
      const Quad decoded = Decoder::Decode(job, coder, bytes, place, now[i]);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        total[i].v[k] = Thread::Add(total[i].v[k], decoded.v[k]);
      }
    }
    sums.Add(payload, totals);
  }
  const uint32_t valid = kWhole ? 4 : ValidOf(element, job.blocks.elements);
  if (!valid) return;
  WithDtype(job.dtype, [&](auto dtype) {
    constexpr int kDtype = decltype(dtype)::value;
    StoreSums<kDtype, kWhole, kQuads>(job, element, valid, total);
  });
}

// A warp takes kQuads rows at a time.
template <class C, class Jobs>
__global__ void __launch_bounds__(kThreads) Decode(const __grid_constant__ Jobs jobs) {
  Place place;
  const DecodeJob& job = jobs.Open(&place);
  constexpr int kQuads = 4;
  constexpr uint32_t kSpan = kQuads * kRow;
  const C coder(CoderSetup{&job.spec, job.workspace.tables + TableOf(job.spec)});
  const PayloadSums sums(job);
  const uint32_t count = job.blocks.elements;
  for (uint32_t first = place.Warp() * kSpan; first < count; first += place.Warps() * kSpan) {
    if (job.aligned && count - first >= kSpan) {
      DecodeRows<C, true, kQuads>(job, coder, sums, first);
    } else {
      for (uint32_t row = first; row < count && row < first + kSpan; row += kRow) {
        DecodeRows<C, false, 1>(job, coder, sums, row);
      }
    }
  }
  AddRest(job, place, sums);
  sums.Finish(job.workspace.checksums);
  if (!LastBlock(place, job.workspace.control)) return;
  if (!Verify(job)) FillWithNan(job);
}

__global__ void __launch_bounds__(kThreads)
    CollectHeaders(const uint8_t* payloads, int64_t stride, int32_t count, uint32_t* flags) {
  const Place place = {blockIdx.x, gridDim.x};
  for (uint32_t k = place.Thread(); k < static_cast<uint32_t>(count); k += place.Threads()) {
    Header header;
    memcpy(&header, payloads + k * stride, sizeof(header));
    // The others say how long a payload is.
    if (header.flags & kFlagNonfinite) atomicOr(flags, kFlagNonfinite);
  }
}

template <class Jobs>
Work<Jobs> DecodeWork(const DecodeJob& job) {
  constexpr int64_t kSpans = 4;  // of a thread's quads
  const int64_t blocks = (BlocksForQuads(job.layout.count) + kSpans - 1) / kSpans;
  const size_t sums = static_cast<size_t>(job.count) * PayloadSums::Slots(job.count);
  return WithCoder(job.spec, [&](auto coder) -> Work<Jobs> {
    using C = typename decltype(coder)::Type;
    return {Decode<C, Jobs>, blocks, sums * sizeof(unsigned long long)};
  });
}

template Work<Single<DecodeJob>> DecodeWork(const DecodeJob& job);
template Work<DecodeBatch> DecodeWork(const DecodeJob& job);

int CollectFlags(const uint8_t* payloads, int64_t stride, int32_t count, uint32_t* flags,
                 cudaStream_t stream) {
  return Launch(CollectHeaders, (count + kThreads - 1) / kThreads, 0, stream, payloads, stride,
                count, flags);
}

}  // namespace HVDC_ARCH
}  // namespace hvdc
