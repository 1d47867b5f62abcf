// The kernels of one instruction set, from its vector type.
#ifndef HVDC_CPU_MAKE_KERNELS_H_
#define HVDC_CPU_MAKE_KERNELS_H_

#include "cpu/chunks.h"
#include "cpu/decode_blocks.h"
#include "cpu/encode_blocks.h"
#include "cpu/statistics.h"
#include "cpu/topk_blocks.h"

namespace hvdc {
namespace HVDC_ARCH {

template <class V>
void Encode(const EncodeJob& job, int64_t first, int64_t last, const Scratch& scratch,
            EncodeResult* result) {
  if (job.spec->codec == HVDC_TOPK) return TopKEncoder<V>::Run(job, first, last, scratch, result);
  WithCoder<V>(*job.spec, [&](auto coder) {
    BlockEncoder<V, typename decltype(coder)::Type>::Run(job, first, last, scratch, result);
  });
}

template <class V>
void DecodeSum(const DecodeJob& job, int64_t first, int64_t last, const Scratch& scratch,
               uint64_t* checksums) {
  if (IsEntropyCoded(*job.spec)) return DecodeChunks<V>(job, first, last, scratch);
  if (job.spec->codec == HVDC_TOPK) {
    return TopKDecoder<V>::Run(job, first, last, scratch, checksums);
  }
  WithCoder<V>(*job.spec, [&](auto coder) {
    BlockDecoder<V, typename decltype(coder)::Type>::Run(job, first, last, scratch, checksums);
  });
}

template <class V>
constexpr Kernels MakeKernels(const char* name) {
  return {name,           Encode<V>,    EncodeChunks<V>, ChunkStats<V>,
          ColumnStats<V>, DecodeSum<V>, Checksum<V>};
}

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CPU_MAKE_KERNELS_H_
