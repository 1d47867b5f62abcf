// The kernels of one instruction set, from its vector type.
#ifndef HVDC_CPU_MAKE_KERNELS_H_
#define HVDC_CPU_MAKE_KERNELS_H_

#include "cpu/chunks.h"
#include "cpu/decode_blocks.h"
#include "cpu/encode_blocks.h"
#include "cpu/level_blocks.h"
#include "cpu/statistics.h"
#include "cpu/topk_blocks.h"

namespace hvdc {
namespace HVDC_ARCH {

// Encodes or decodes blocks with the coder of their codec, one of those that send every element.
template <class V, template <class, class> class Blocks, class... Arguments>
void RunBlocks(const hvdc_spec& spec, const Arguments&... arguments) {
  switch (spec.codec) {
    case HVDC_ONEBIT:
      if (spec.grouping >= HVDC_ROW) return Blocks<V, OneBitMatrixCoder<V>>::Run(arguments...);
      return Blocks<V, OneBitCoder<V>>::Run(arguments...);
    case HVDC_INT8:
      if (spec.variant == HVDC_LINEAR) return Blocks<V, LinearCoder<V>>::Run(arguments...);
      if (spec.variant == HVDC_E4M3) return Blocks<V, E4M3Coder<V>>::Run(arguments...);
      if (spec.variant == HVDC_E5M2) return Blocks<V, E5M2Coder<V>>::Run(arguments...);
      return Blocks<V, TableCoder<V>>::Run(arguments...);
    case HVDC_TERNARY:
      return Blocks<V, TernaryCoder<V>>::Run(arguments...);
    case HVDC_ECQ:
      return Blocks<V, EcqCoder<V>>::Run(arguments...);
    case HVDC_FP16:
      return Blocks<V, HalfCoder<V>>::Run(arguments...);
    case HVDC_BF16:
      if (spec.variant == HVDC_STOCHASTIC) {
        return Blocks<V, StochasticBfloatCoder<V>>::Run(arguments...);
      }
      return Blocks<V, BfloatCoder<V>>::Run(arguments...);
    default:
      return Blocks<V, FloatCoder<V>>::Run(arguments...);
  }
}

template <class V>
void Encode(const EncodeJob& job, int64_t first, int64_t last, const Scratch& scratch,
            EncodeResult* result) {
  if (job.spec->codec == HVDC_TOPK) return TopKEncoder<V>::Run(job, first, last, scratch, result);
  RunBlocks<V, BlockEncoder>(*job.spec, job, first, last, scratch, result);
}

template <class V>
void DecodeSum(const DecodeJob& job, int64_t first, int64_t last, const Scratch& scratch,
               uint64_t* checksums) {
  if (IsEntropyCoded(*job.spec)) return DecodeChunks<V>(job, first, last, scratch);
  if (job.spec->codec == HVDC_TOPK) {
    return TopKDecoder<V>::Run(job, first, last, scratch, checksums);
  }
  RunBlocks<V, BlockDecoder>(*job.spec, job, first, last, scratch, checksums);
}

template <class V>
constexpr Kernels MakeKernels(const char* name) {
  return {name,         Encode<V>,   EncodeChunks<V>, ChunkStats<V>,   ColumnStats<V>,
          DecodeSum<V>, Checksum<V>, LevelNorms<V>,   EncodeLevels<V>, DecodeLevels<V>};
}

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CPU_MAKE_KERNELS_H_
