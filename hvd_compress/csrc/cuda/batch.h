// The kernels' parameters: many jobs each. What stays the same from call to call is in the
// device's memory; what changes is in the parameter itself: so a call copies nothing to the device,
// and a CUDA graph can repeat it.
#ifndef HVDC_CUDA_BATCH_H_
#define HVDC_CUDA_BATCH_H_

#include "cuda/grid.h"

namespace hvdc {

// The part of a batch on which a block of threads works.
struct Share {
  uint32_t item;
  uint32_t block, blocks;  // its place among the item's
  uint32_t array;          // in the parameter
};

// A job of a batch, but for what calls change.
struct EncodeItem {
  EncodeJob job;
  int64_t first;   // element of the array
  int64_t offset;  // of the payload
};

struct DecodeItem {
  DecodeJob job;
  int64_t first;
  int64_t offset;
};

namespace HVDC_ARCH {

__device__ inline bool AlignedTo(const void* pointer, uint32_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

HVDC_HD int64_t ElementBytes(int dtype) { return dtype == HVDC_DTYPE_FLOAT32 ? 4 : 2; }

// Copies an item's job to the block's shared memory. Called by all threads, which have to meet
// before they read it.
template <class Job>
__device__ inline void CopyJob(const Job& from, Job* to) {
  static_assert(sizeof(Job) % 8 == 0, "copied in words");
  const uint64_t* const words = reinterpret_cast<const uint64_t*>(&from);
  for (uint32_t i = threadIdx.x; i < sizeof(Job) / 8; i += kThreads) {
    reinterpret_cast<uint64_t*>(to)[i] = words[i];
  }
}

// Parameters take 4,096 bytes at the most: a batch of more than kArrays arrays is several launches.
struct EncodeBatch {
  static constexpr int kArrays = 120;

  __device__ const EncodeJob& Open(Place* place) const {
    __shared__ EncodeJob job;
    const Share share = shares[blockIdx.x];
    const EncodeItem& item = items[share.item];
    *place = {share.block, share.blocks};
    CopyJob(item.job, &job);
    __syncthreads();
    if (threadIdx.x == 0) {
      const int dtype = dtypes[share.array];
      const int64_t width = ElementBytes(dtype);
      job.gradient = static_cast<const uint8_t*>(gradients[share.array]) + item.first * width;
      job.dtype = dtype;
      job.aligned = AlignedTo(job.gradient, static_cast<uint32_t>(4 * width));
      if (job.mode != Mode::kNone) {
        const int64_t bytes = ElementBytes(job.residual_dtype);
        const uint32_t quad = static_cast<uint32_t>(4 * bytes);
        const int64_t first = item.first * bytes;
        job.residual = static_cast<const uint8_t*>(residuals[share.array]) + first;
        job.next_residual = static_cast<uint8_t*>(next_residuals[share.array]) + first;
        job.aligned =
            job.aligned && AlignedTo(job.residual, quad) && AlignedTo(job.next_residual, quad);
      }
      job.payload = message + item.offset;
      const uint64_t step = steps[share.array];
      job.step = job.noise.step_low = static_cast<uint32_t>(step);
      job.noise.step_high = static_cast<uint32_t>(step >> 32);
    }
    __syncthreads();
    return job;
  }

  const EncodeItem* items;
  const Share* shares;
  uint8_t* message;
  const void* gradients[kArrays];
  const void* residuals[kArrays];
  void* next_residuals[kArrays];
  uint64_t steps[kArrays];
  uint8_t dtypes[kArrays];
};

struct DecodeBatch {
  static constexpr int kArrays = 256;

  __device__ const DecodeJob& Open(Place* place) const {
    __shared__ DecodeJob job;
    const Share share = shares[blockIdx.x];
    const DecodeItem& item = items[share.item];
    *place = {share.block, share.blocks};
    CopyJob(item.job, &job);
    __syncthreads();
    if (threadIdx.x == 0) {
      const int dtype = dtypes[share.array];
      const int64_t width = ElementBytes(dtype);
      job.out = static_cast<uint8_t*>(values[share.array]) + item.first * width;
      job.dtype = dtype;
      job.aligned = AlignedTo(job.out, static_cast<uint32_t>(4 * width));
      job.payloads = rows + item.offset;
      job.stride = stride;
      job.scale = scale;
      job.step = steps[share.array];
      job.flags = flags;
      job.error = error;
      job.tag = tag;
      job.number = share.item;
    }
    __syncthreads();
    return job;
  }

  const DecodeItem* items;
  const Share* shares;
  const uint8_t* rows;
  int64_t stride;
  uint32_t* flags;
  hvdc_cuda_error* error;
  uint64_t tag;
  void* values[kArrays];
  uint32_t steps[kArrays];
  float scale;
  uint8_t dtypes[kArrays];
};

static_assert(sizeof(EncodeBatch) <= 4096 && sizeof(DecodeBatch) <= 4096, "kernel parameters");

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CUDA_BATCH_H_
