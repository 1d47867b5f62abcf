// Threads, warps and blocks, and what they add up together.
#ifndef HVDC_CUDA_GRID_H_
#define HVDC_CUDA_GRID_H_

#include <cuda_runtime.h>

#include "codec/checksum.h"
#include "cuda/jobs.h"

namespace hvdc {
namespace HVDC_ARCH {

__device__ inline uint32_t WarpOfBlock() { return threadIdx.x / kWarpSize; }
__device__ inline uint32_t LaneOfWarp() { return threadIdx.x % kWarpSize; }

// The number of this block of threads among a job's, and how many there are.
struct Place {
  __device__ uint32_t Thread() const { return block * kThreads + threadIdx.x; }
  __device__ uint32_t Threads() const { return blocks * kThreads; }
  __device__ uint32_t Warp() const { return block * kWarps + WarpOfBlock(); }
  __device__ uint32_t Warps() const { return blocks * kWarps; }

  uint32_t block, blocks;
};

// Shared memory of the size that the launch gave the block.
#if defined(__CUDACC__)
__device__ inline uint8_t* SharedMemory() {
  extern __shared__ uint4 hvdc_shared_memory[];
  return reinterpret_cast<uint8_t*>(hvdc_shared_memory);
}
#else
inline uint8_t* SharedMemory() { return emulated::DynamicShared(); }
#endif

__device__ inline unsigned long long WarpSum(unsigned long long x) {
  for (int width = kWarpSize / 2; width; width /= 2) {
    x += __shfl_xor_sync(kFullWarp, x, width, kWarpSize);
  }
  return x;
}

// A thread's contributions to the payload's header.
struct Totals {
  uint64_t checksum = 0;
  bool nonfinite = false;

  // A word that was written, or read, at that place in the payload.
  __device__ void Word(uint32_t word, uint32_t index) { checksum += WeightedWord(word, index); }
};

// Adds the totals of all threads of a warp to the workspace's.
__device__ inline void AddTotals(Control* control, const Totals& totals) {
  const unsigned long long sum = WarpSum(totals.checksum);
  const bool nonfinite = __any_sync(kFullWarp, totals.nonfinite);
  if (LaneOfWarp() == 0) {
    if (sum) atomicAdd(&control->checksum, sum);
    if (nonfinite) atomicOr(&control->nonfinite, 1u);
  }
}

// Whether this is the last of the job's blocks to come here: then it sees all that the others have
// written. Called once by all threads of all of them.
__device__ inline bool LastBlock(const Place& place, Control* control) {
  __shared__ uint32_t ticket;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) ticket = atomicAdd(&control->tickets, 1u);
  __syncthreads();
  const bool last = ticket == place.blocks - 1;
  if (last) __threadfence();
  return last;
}

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CUDA_GRID_H_
