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

// The values that a kernel's blocks of threads keep from beginning to end.
template <class C>
struct Tools {
  C coder;
  const float* numbers;  // SignedNumbers
  PayloadSums sums;
};

// kQuads rows of a warp from an element on, of some payloads together, one after the other. kWhole:
// all of their elements exist. Several rows are in one block.
template <class C, bool kWhole, int kQuads>
__device__ inline void DecodeRows(const DecodeJob& job, const Tools<C>& tools, uint32_t first) {
  using Decoder = QuadDecoder<C, kWhole>;
  using F = Format<C>;
  const uint32_t element = first + 4 * LaneOfWarp();
  QuadPlace<C, kWhole> places[kQuads];
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    places[i].Set(job, element + static_cast<uint32_t>(i) * kRow);
  }
  Quad total[kQuads] = {};
  const uint8_t* payloads = job.payloads;
  const int64_t stride = job.stride;
  const int32_t count = job.count;
  const uint32_t uppers = static_cast<uint32_t>(job.layout.scales / 2);
  int32_t at = 0;
  const auto add = [&](auto number) {
    constexpr int kNumber = decltype(number)::value;
    typename Decoder::Codes codes[kNumber][kQuads];
    Scales scales[kNumber][kQuads];
#pragma unroll
    for (int n = 0; n < kNumber; ++n) {
      const uint8_t* const payload = payloads + n * stride;
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
        // Where the distance is a constant, the address is one.
        const uint32_t* const words =
            reinterpret_cast<const uint32_t*>(payload) +
            (F::kStep ? places[0].index + int64_t{F::kStep} * i : places[i].index);
        codes[n][i] = Decoder::Read(words, places[i].reads);
        scales[n][i] = i ? scales[n][0] : Decoder::ReadScales(payload, places[i].group, uppers);
      }
    }
    uint64_t checksums[kNumber];
#pragma unroll
    for (int n = 0; n < kNumber; ++n) {
      const uint8_t* const payload = payloads + n * stride;
      checksums[n] = 0;
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
        checksums[n] += Decoder::Checksum(codes[n][i], places[i].weight);
        const Quad decoded = Decoder::Decode(tools.coder, tools.numbers, payload, uppers, places[i],
                                             codes[n][i], scales[n][i]);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          total[i].v[k] = Thread::Add(total[i].v[k], decoded.v[k]);
        }
      }
    }
    tools.sums.template Add<kNumber>(at, checksums);
    payloads += kNumber * stride;
    at += kNumber;
  };
  if constexpr (kWhole && F::kTogether == 4) {
    while (count - at >= 4) add(std::integral_constant<int, 4>());
  }
  if constexpr (kWhole && F::kTogether > 1) {
    while (count - at >= 2) add(std::integral_constant<int, 2>());
  }
  while (at < count) add(std::integral_constant<int, 1>());
  const uint32_t valid = kWhole ? 4 : ValidOf(element, job.blocks.elements);
  if (!valid) return;
  WithDtype(job.dtype, [&](auto dtype) {
    constexpr int kDtype = decltype(dtype)::value;
    if (kWhole && job.aligned) {
      StoreSums<kDtype, true, kQuads>(job, element, 4, total);
    } else {
      StoreSums<kDtype, false, kQuads>(job, element, valid, total);
    }
  });
}

// Blocks of threads that a multiprocessor has to have room for: this bounds their registers. With
// six, kernels that know more of each quad's place would keep some of it in memory.
template <class C>
constexpr int kBlocksToDecode =
    Format<C>::kStep && !Format<C>::kMatrix && Format<C>::kWords < 4 ? 6 : 5;

// A warp takes kQuads rows at a time.
template <class C>
__global__ void __launch_bounds__(kThreads, kBlocksToDecode<C>)
    Decode(const __grid_constant__ DecodeBatch batch) {
  Place place;
  const DecodeJob& job = batch.Open(&place);
  constexpr int kQuads = 4;
  constexpr uint32_t kSpan = kQuads * kRow;
  const C coder(CoderSetup{&job.spec, job.workspace.tables + TableOf(job.spec)});
  const Tools<C> tools = {coder, SignedNumbers(coder), PayloadSums(job)};
  const uint32_t count = job.blocks.elements;
  for (uint32_t first = place.Warp() * kSpan; first < count; first += place.Warps() * kSpan) {
    const bool whole = count - first >= kSpan;
    const Divider& size = job.blocks.by_size;
    if (whole && Quotient(size, first) == Quotient(size, first + kSpan - 1)) {
      DecodeRows<C, true, kQuads>(job, tools, first);
      continue;
    }
    for (uint32_t row = first; row < count && row < first + kSpan; row += kRow) {
      if (whole) {
        DecodeRows<C, true, 1>(job, tools, row);
      } else {
        DecodeRows<C, false, 1>(job, tools, row);
      }
    }
  }
  FinishDecoding(job, place, tools.sums);
}

Work<DecodeBatch> DecodeWork(const DecodeJob& job) {
  if (job.spec.codec == HVDC_TOPK) return TopKDecodeWork(job);
  constexpr int64_t kSpans = 4;  // of a thread's quads
  const int64_t blocks = (BlocksForQuads(job.layout.count) + kSpans - 1) / kSpans;
  return WithCoder<Thread>(job.spec, [&](auto coder) -> Work<DecodeBatch> {
    using C = typename decltype(coder)::Type;
    return {Decode<C>, blocks, PayloadSums::Bytes(job.count)};
  });
}

}  // namespace HVDC_ARCH
}  // namespace hvdc
