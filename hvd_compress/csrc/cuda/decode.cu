// Decoding: all payloads in one pass, their checksums taken on the way and looked at by the last
// block.
#define HVDC_ARCH device

#include "cuda/batch.h"
#include "cuda/decode_quads.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/payload_sums.h"

namespace hvdc {
namespace HVDC_ARCH {

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
  const PayloadSums sums(job, PayloadSums::Slots(job.count));
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
  FinishDecoding(job, place, sums);
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
  if (job.spec.codec == HVDC_TOPK) return TopKDecodeWork<Jobs>(job);
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
