// Decoding: all payloads in one pass, their checksums taken on the way and looked at by the last
// block.
#define HVDC_ARCH device

#include "codec/header.h"
#include "cuda/decode_quads.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"

namespace hvdc {
namespace HVDC_ARCH {

// A warp's sums for each payload, in shared memory: [payload][warp].
struct PayloadSums {
  __device__ PayloadSums(const DecodeJob& job)
      : sums(reinterpret_cast<unsigned long long*>(SharedMemory())), count(job.count) {
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < kWarps * count; i += kThreads) {
      sums[i] = 0;
    }
    __syncthreads();
  }

  // Called by all threads of a warp.
  __device__ void Add(int32_t payload, const Totals& totals) const {
    const unsigned long long sum = WarpSum(totals.checksum);
    if (LaneOfWarp() == 0) sums[payload * kWarps + static_cast<int32_t>(WarpOfBlock())] += sum;
  }

  // Called by all threads of a block.
  __device__ void Finish(unsigned long long* all) const {
    __syncthreads();
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < count; i += kThreads) {
      unsigned long long sum = 0;
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) sum += sums[i * kWarps + warp];
      if (sum) atomicAdd(&all[i], sum);
    }
  }

  unsigned long long* sums;
  int32_t count;
};

// The words that no quad has read: header, scales that belong to many blocks, padding.
__device__ inline void AddRest(const DecodeJob& job, const PayloadSums& sums) {
  const Layout& layout = job.layout;
  const int64_t own = IsContiguous(job.spec) ? 4 * layout.scales : 0;
  const int64_t header = (kHeaderBytes - 8) / 4;
  const int64_t scales = (layout.codes_offset - kHeaderBytes - own) / 4;
  int64_t end = layout.payload_bytes;
  if (layout.count) {
    // As far as quads reach: four elements' codes, or whole words of packed ones.
    const int64_t reach = IsCast(job.spec) ? (job.spec.codec == HVDC_FP32 ? 16 : 8) : 4;
    end = RoundUp(BlockOffset(layout, layout.blocks - 1) + layout.last_bytes, reach);
  }
  const int64_t all = header + scales + (layout.payload_bytes - end) / 4;
  // Whole warps at a time, so that their sums can be taken.
  for (int64_t first = WarpOfGrid() * kWarpSize; first < all; first += ThreadsOfGrid()) {
    const int64_t i = first + LaneOfWarp();
    int64_t at = 4 * i;
    if (i >= header) at = kHeaderBytes + own + 4 * (i - header);
    if (i >= header + scales) at = end + 4 * (i - header - scales);
    for (int32_t k = 0; k < job.count; ++k) {
      Totals totals;
      if (i < all) {
        totals.Word(*reinterpret_cast<const uint32_t*>(job.payloads + k * job.stride + at), at);
      }
      sums.Add(k, totals);
    }
  }
}

// Plain writes, since atomic ones need not work on host memory; the status last, for a host that
// looks at any time.
__device__ inline void Report(const DecodeJob& job, uint32_t status, int32_t payload) {
  volatile hvdc_cuda_error* const error = job.error;
  if (error->status != HVDC_OK) return;
  error->payload = payload;
  error->tag = job.tag;
  __threadfence_system();
  error->status = status;
}

// Run by the last block: what is wrong with the payloads, if anything, is recorded. Returns whether
// all are right.
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
    if (status != HVDC_OK) atomicMin(&worst, 8 * static_cast<uint32_t>(k) + status);
  }
  __syncthreads();
  const uint32_t found = worst;
  if (threadIdx.x == 0) {
    atomicExch(&job.workspace.control->tickets, 0u);
    if (found != ~0u && job.error) Report(job, found % 8, static_cast<int32_t>(found / 8));
  }
  return found == ~0u;
}

__device__ inline void FillWithNan(const DecodeJob& job) {
  Quad nan;
#pragma unroll
  for (int k = 0; k < 4; ++k) nan.v[k] = BitsFloat(kNanBits);
  const uint32_t count = static_cast<uint32_t>(job.layout.count);
  for (uint32_t at = 4 * threadIdx.x; at < count; at += 4 * kThreads) {
    StoreQuad(job.dtype, job.out, at, ValidOf(at, count), job.aligned, nan);
  }
}

__device__ inline void StoreSum(const DecodeJob& job, const QuadPlace& place, Quad total) {
  if (!place.valid) return;
  Quad before = {};
  if (job.accumulate) {
    before = LoadQuad(job.dtype, job.out, place.element, place.valid, job.aligned);
  }
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    total.v[k] = Thread::Mul(total.v[k], job.scale);
    if (job.accumulate) total.v[k] = Thread::Add(before.v[k], total.v[k]);
  }
  StoreQuad(job.dtype, job.out, place.element, place.valid, job.aligned, total);
}

__device__ inline void StoreTakenBack(const DecodeJob& job, const QuadPlace& place,
                                      const Quad& decoded) {
  if (!place.valid) return;
  const Quad g = LoadQuad(job.dtype, job.gradient, place.element, place.valid, job.aligned);
  Quad h = LoadQuadAs<HVDC_DTYPE_FLOAT32>(job.residual, place.element, place.valid, job.aligned);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    h.v[k] = hvdc::HVDC_ARCH::TakeBack<Thread>(g.v[k], h.v[k], decoded.v[k], job.beta);
  }
  StoreQuadAs<HVDC_DTYPE_FLOAT32>(job.residual, place.element, place.valid, job.aligned, h);
}

// A warp takes kQuads times 128 neighbouring elements at a time, of one payload after the other.
template <class C, bool kBack>
__global__ void __launch_bounds__(kThreads) Decode(const DecodeJob job) {
  constexpr int kQuads = 4;
  constexpr uint32_t kSpan = kQuads * 4 * kWarpSize;
  if (kBack && job.when && !*job.when) return;
  const C coder(CoderSetup{&job.spec, job.workspace.tables + TableOf(job.spec)});
  const PayloadSums sums(job);
  const uint32_t count = static_cast<uint32_t>(job.layout.count);
  for (uint32_t first = WarpOfGrid() * kSpan; first < count; first += WarpsOfGrid() * kSpan) {
    Quad total[kQuads] = {};
    const auto place_of = [&](int i) {
      return QuadPlace(job.layout,
                       first + 4 * (static_cast<uint32_t>(i) * kWarpSize + LaneOfWarp()));
    };
    for (int32_t payload = 0; payload < job.count; ++payload) {
      Totals totals;
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
        const QuadPlace place = place_of(i);
        if (!place.valid) continue;
        const uint8_t* bytes = job.payloads + payload * job.stride;
        const Quad decoded = QuadDecoder<C>::Run(job, coder, bytes, place, &totals);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          total[i].v[k] = kBack ? decoded.v[k] : Thread::Add(total[i].v[k], decoded.v[k]);
        }
      }
      sums.Add(payload, totals);
    }
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      if constexpr (kBack) {
        StoreTakenBack(job, place_of(i), total[i]);
      } else {
        StoreSum(job, place_of(i), total[i]);
      }
    }
  }
  AddRest(job, sums);
  sums.Finish(job.workspace.checksums);
  if (!LastBlock(job.workspace.control)) return;
  if (!Verify(job) && !kBack) FillWithNan(job);
}

__global__ void __launch_bounds__(kThreads)
    CollectHeaders(const uint8_t* payloads, int64_t stride, int32_t count, uint32_t* flags) {
  for (uint32_t k = ThreadOfGrid(); k < static_cast<uint32_t>(count); k += ThreadsOfGrid()) {
    Header header;
    memcpy(&header, payloads + k * stride, sizeof(header));
    if (header.flags) atomicOr(flags, header.flags);
  }
}

namespace {

template <bool kBack>
int LaunchDecode(const DecodeJob& job, cudaStream_t stream) {
  constexpr int64_t kSpans = 4;  // of a thread's quads
  const uint32_t blocks = GridFor((BlocksForQuads(job.layout.count) + kSpans - 1) / kSpans);
  const size_t shared = static_cast<size_t>(job.count) * kWarps * sizeof(unsigned long long);
  return WithCoder(job.spec, [&](auto coder) {
    using C = typename decltype(coder)::Type;
    return Launch(Decode<C, kBack>, blocks, kThreads, shared, stream, job);
  });
}

}  // namespace

int DecodeSum(const DecodeJob& job, cudaStream_t stream) {
  return LaunchDecode<false>(job, stream);
}

int TakeBack(const DecodeJob& job, cudaStream_t stream) { return LaunchDecode<true>(job, stream); }

int CollectFlags(const uint8_t* payloads, int64_t stride, int32_t count, uint32_t* flags,
                 cudaStream_t stream) {
  return Launch(CollectHeaders, GridFor((count + kThreads - 1) / kThreads), kThreads, 0, stream,
                payloads, stride, count, flags);
}

}  // namespace HVDC_ARCH
}  // namespace hvdc
