// The lane sums of docs/format.md on a warp: thread l of each half adds elements l, l + 16, ... of
// a chunk, and the halves' sixteen sums are folded by exchanging them. Chunks' sums go the same
// way.
#ifndef HVDC_CUDA_SUMS_H_
#define HVDC_CUDA_SUMS_H_

#include "codec/stats.h"
#include "codec/sums.h"
#include "cuda/grid.h"
#include "simd/thread.h"

namespace hvdc {
namespace HVDC_ARCH {

__device__ inline uint32_t LaneOfSum() { return threadIdx.x % kLanes; }

// The sums of a chunk of count elements, known to all threads of the half warp afterwards. read(i):
// element i. Both halves of a warp come here together, with chunks of their own or with the same.
template <StatsKind kKind, class Read>
__device__ inline GroupStats SumChunk(uint32_t count, const Read& read) {
  constexpr uint32_t kAhead = 8;  // elements that are asked for before the first of them is added
  Accumulator<Thread, kKind> sums;
  uint32_t at = LaneOfSum();
  for (const uint32_t whole = count / (kAhead * kLanes) * (kAhead * kLanes); at < whole;
       at += kAhead * kLanes) {
    float x[kAhead];
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i) x[i] = read(at + i * kLanes);
#pragma unroll
    for (uint32_t i = 0; i < kAhead; ++i) sums.Add(x[i]);
  }
  for (; at < count; at += kLanes) sums.Add(read(at));
  GroupStats stats = {};
  sums.Finish(&stats);
  return stats;
}

// Adds up what SumChunk gives, in the same lanes: lane l takes chunks l, l + 16, ... in that order.
template <StatsKind kKind>
struct ChunkTotals {
  using A = Accumulator<Thread, kKind>;

  __device__ void Add(const GroupStats& chunk) {
    all.largest = Thread::MaxI(all.largest, chunk.largest);
    all.above += chunk.above;
    if constexpr (A::kSides) {
      all.lower = Thread::Add(all.lower, chunk.lower);
      all.upper = Thread::Add(all.upper, chunk.upper);
    }
    if constexpr (A::kSum) all.sum = Thread::AddD(all.sum, chunk.sum);
    if constexpr (A::kSquare) all.square = Thread::AddD(all.square, chunk.square);
  }

  __device__ GroupStats Finish() const {
    GroupStats stats = {};
    stats.largest = Thread::LargestLane(all.largest);
    if constexpr (A::kSides) {
      stats.above = Thread::FoldCount(all.above);
      stats.lower = Thread::Fold(all.lower);
      stats.upper = Thread::Fold(all.upper);
    }
    if constexpr (A::kSum) stats.sum = Thread::FoldD(all.sum);
    if constexpr (A::kSquare) stats.square = Thread::FoldD(all.square);
    return stats;
  }

  GroupStats all = {};
};

// The sums of up to 2,048 chunks.
template <StatsKind kKind>
__device__ inline GroupStats SumChunks(const GroupStats* chunks, int64_t count) {
  ChunkTotals<kKind> totals;
#pragma unroll 8
  for (int64_t i = LaneOfSum(); i < count; i += kLanes) totals.Add(chunks[i]);
  return totals.Finish();
}

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CUDA_SUMS_H_
