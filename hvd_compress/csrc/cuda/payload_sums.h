// Checksums of payloads: decoding takes them on the way, and the last block compares them.
#ifndef HVDC_CUDA_PAYLOAD_SUMS_H_
#define HVDC_CUDA_PAYLOAD_SUMS_H_

#include "cuda/finish.h"
#include "cuda/quads.h"

namespace hvdc {
namespace HVDC_ARCH {

// The sums of every warp for each payload, in shared memory.
struct PayloadSums {
  HVDC_HD static size_t Bytes(int32_t payloads) {
    return static_cast<size_t>(payloads) * kWarps * sizeof(unsigned long long);
  }

  __device__ PayloadSums(const DecodeJob& job)
      : sums(reinterpret_cast<unsigned long long*>(SharedMemory())), payloads(job.count) {
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < kWarps * payloads; i += kThreads) {
      sums[i] = 0;
    }
    __syncthreads();
  }

  // Adds up what the threads of a warp bring for kNumber payloads, 1, 2 or 4 in a row. Called by
  // all of them. At first every exchange halves the payloads that a thread has sums of.
  template <uint32_t kNumber>
  __device__ void Add(int32_t payload, const uint64_t* threads) const {
    unsigned long long x[kNumber];
#pragma unroll
    for (uint32_t i = 0; i < kNumber; ++i) x[i] = threads[i];
    uint32_t width = kWarpSize / 2;
#pragma unroll
    for (uint32_t half = kNumber / 2; half; half /= 2, width /= 2) {
      const bool second = threadIdx.x & width;
#pragma unroll
      for (uint32_t i = 0; i < half; ++i) {
        const unsigned long long given = second ? x[i] : x[i + half];
        const unsigned long long own = second ? x[i + half] : x[i];
        x[i] = own + __shfl_xor_sync(kFullWarp, given, static_cast<int>(width), kWarpSize);
      }
    }
#pragma unroll
    for (; width; width /= 2) {
      x[0] += __shfl_xor_sync(kFullWarp, x[0], static_cast<int>(width), kWarpSize);
    }
    constexpr uint32_t kShare = kWarpSize / kNumber;
    __syncwarp();  // With other numbers together, another thread has added to a payload's sum.
    if (LaneOfWarp() % kShare) return;
    sums[(static_cast<uint32_t>(payload) + LaneOfWarp() / kShare) * kWarps + WarpOfBlock()] += x[0];
  }

  // Called by all threads of a block.
  __device__ void Finish(unsigned long long* all) const {
    __syncthreads();
    for (int32_t k = static_cast<int32_t>(threadIdx.x); k < payloads; k += kThreads) {
      unsigned long long sum = 0;
#pragma unroll
      for (int32_t i = 0; i < kWarps; ++i) sum += sums[k * kWarps + i];
      if (sum) atomicAdd(&all[k], sum);
    }
  }

  unsigned long long* sums;
  int32_t payloads;
};

// The words that quads do not add: header, scales, padding.
__device__ inline void AddRest(const DecodeJob& job, const Place& place, const PayloadSums& sums) {
  const Blocks& blocks = job.blocks;
  const uint32_t header = kHeaderWords - 2;  // the rest of it is the checksum
  const uint32_t before = blocks.codes - 2;
  const uint32_t words = static_cast<uint32_t>(job.layout.payload_bytes / 4);
  uint32_t end = words;
  if (blocks.count) {
    // The words of a quad: two and four for casts.
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
      sums.Add<1>(k, &totals.checksum);
    }
  }
}

// Tells of payloads that are wrong. Called by one thread of every job of a call. found: eight times
// the index of the first payload that is wrong, plus its status; all bits set where there is none.
// The last one to come writes what the job of the lowest number has found, whatever the order: so
// there is one writer, and what it writes does not depend on the device.
__device__ inline void Report(const DecodeJob& job, uint32_t found) {
  constexpr unsigned long long kNothing = ~0ull;
  Verdict* const verdict = job.workspace.verdict;
  if (found != ~0u) {
    atomicMax(&verdict->worst, ~(static_cast<unsigned long long>(job.number) << 32 | found));
  }
  __threadfence();
  if (atomicAdd(&verdict->done, 1u) != job.jobs - 1) return;
  __threadfence();
  const unsigned long long first = ~atomicExch(&verdict->worst, 0ull);
  atomicExch(&verdict->done, 0u);
  volatile hvdc_cuda_error* const error = job.error;
  if (first == kNothing || !error || error->status != HVDC_OK) return;
  // Plain writes, since atomic ones need not work on host memory; the status last, for a host that
  // looks at any time.
  error->payload = static_cast<int32_t>(static_cast<uint32_t>(first) / 8);
  error->tag = job.tag + (first >> 32);
  __threadfence_system();
  error->status = static_cast<uint32_t>(first) % 8;
}

// Run by the last block: what is wrong with the payloads, if anything, is recorded, and so is
// whether the result is not finite: by what their headers say, or because of a payload that is
// wrong. Returns whether all are right.
__device__ inline bool Verify(const DecodeJob& job) {
  __shared__ uint32_t worst;  // eight times a payload's index, plus its status
  Control* const control = job.workspace.control;
  const uint32_t wrong = atomicOr(&control->wrong, 0u);
  if (threadIdx.x == 0) worst = ~0u;
  __syncthreads();
  for (int32_t k = static_cast<int32_t>(threadIdx.x); k < job.count; k += kThreads) {
    Header header;
    memcpy(&header, job.payloads + k * job.stride, sizeof(header));
    const unsigned long long sum = atomicExch(&job.workspace.checksums[k], 0ull);
    uint32_t status = HVDC_OK;
    if (wrong == static_cast<uint32_t>(job.count - k)) status = HVDC_BAD_CODES;
    if (sum != header.checksum) status = HVDC_BAD_CHECKSUM;
    if (!HeaderFits(job.spec, job.layout, job.step, header)) status = HVDC_BAD_HEADER;
    const bool finite = status == HVDC_OK && !(header.flags & kFlagNonfinite);
    if (job.flags && !finite) atomicOr(job.flags, kFlagNonfinite);
    if (status != HVDC_OK) atomicMin(&worst, 8 * static_cast<uint32_t>(k) + status);
  }
  __syncthreads();
  const uint32_t found = worst;
  if (threadIdx.x == 0) {
    atomicExch(&control->tickets, 0u);
    atomicExch(&control->wrong, 0u);
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

// The thread's quads of neighbouring rows.
template <int kDtype, bool kWhole, int kQuads>
__device__ inline void StoreSums(const DecodeJob& job, uint32_t element, uint32_t valid,
                                 const Quad* sums) {
#pragma unroll
  for (uint32_t i = 0; i < kQuads; ++i) {
    Quad after;
#pragma unroll
    for (int k = 0; k < 4; ++k) after.v[k] = Thread::Mul(sums[i].v[k], job.scale);
    StoreQuadAs<kDtype, kWhole>(job.out, element + i * kRow, valid, after);
  }
}

// Called by all threads when the sums are stored.
__device__ inline void FinishDecoding(const DecodeJob& job, const Place& place,
                                      const PayloadSums& sums) {
  AddRest(job, place, sums);
  sums.Finish(job.workspace.checksums);
  if (!LastBlock(place, job.workspace.control)) return;
  if (!Verify(job)) FillWithNan(job);
}

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CUDA_PAYLOAD_SUMS_H_
