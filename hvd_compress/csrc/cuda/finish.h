// The last block of an encoding kernel writes header and padding.
#ifndef HVDC_CUDA_FINISH_H_
#define HVDC_CUDA_FINISH_H_

#include "codec/onebit.h"
#include "cuda/grid.h"

namespace hvdc {
namespace HVDC_ARCH {

constexpr uint32_t kHeaderWords = kHeaderBytes / 4;

__device__ inline float* ScalesOf(uint8_t* payload) {
  return reinterpret_cast<float*>(payload + kHeaderBytes);
}

// The number of the table that a spec's coder uses, if any.
HVDC_HD uint32_t TableOf(const hvdc_spec& spec) {
  const bool tables = spec.codec == HVDC_INT8 && spec.variant != HVDC_LINEAR;
  return tables ? spec.variant - HVDC_DYNAMIC : 0;
}

// 1-bit by row or column: the groups of four neighbouring elements.
struct MatrixGroups {
  __device__ void Set(const hvdc_spec& spec, uint32_t element) {
    const uint32_t columns = static_cast<uint32_t>(spec.columns);
    const uint32_t rows = static_cast<uint32_t>(spec.rows);
    const bool by_row = spec.grouping == HVDC_ROW;
    uint32_t row = element / columns, column = element % columns;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      // Past the tensor's end any group will do.
      groups[k] = by_row ? (row < rows ? row : 0) : column;
      if (++column == columns) {
        column = 0;
        ++row;
      }
    }
  }

  uint32_t groups[4];
};

// Their values.
__device__ inline void LoadMatrixValues(const hvdc_spec& spec, const uint8_t* payload,
                                        uint32_t element, float* lower, float* upper) {
  const float* scales = reinterpret_cast<const float*>(payload + kHeaderBytes);
  const int64_t groups = spec.grouping == HVDC_ROW ? spec.rows : spec.columns;
  MatrixGroups own;
  own.Set(spec, element);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    lower[k] = scales[own.groups[k]];
    upper[k] = scales[groups + own.groups[k]];
  }
}

// Scales that were stored before this kernel: added to the checksum, and made NaN as a whole where
// one of a matrix's groups is not finite.
__device__ inline void AddSharedScales(const EncodeJob& job, const Place& place, bool finite,
                                       Totals* totals) {
  const bool blank =
      job.spec.codec == HVDC_ONEBIT && !finite && job.spec.grouping != HVDC_CONTIGUOUS;
  float* const scales = ScalesOf(job.payload);
  const uint32_t count = static_cast<uint32_t>(job.layout.scales);
  for (uint32_t i = place.Thread(); i < count; i += place.Threads()) {
    if (blank) scales[i] = BitsFloat(kNanBits);
    totals->Word(FloatBits(blank ? BitsFloat(kNanBits) : scales[i]), kHeaderWords + i);
  }
}

// Run by one thread of the last block, when the checksum of all else has been added up.
__device__ inline void StoreHeader(const EncodeJob& job, uint32_t flags) {
  Control* const control = job.workspace.control;
  Header header = MakeHeader(job.spec, job.layout, job.step);
  header.flags = flags;
  header.checksum = atomicExch(&control->checksum, 0ull);
  atomicExch(&control->tickets, 0u);
  uint32_t words[kHeaderWords];
  memcpy(words, &header, sizeof(words));
  uint64_t sum = header.checksum;
#pragma unroll
  for (uint32_t i = 0; i < 6; ++i) sum += WeightedWord(words[i], i);
  words[6] = static_cast<uint32_t>(sum);
  words[7] = static_cast<uint32_t>(sum >> 32);
  uint32_t* const to = job.payload.As<uint32_t>();
#pragma unroll
  for (uint32_t i = 0; i < kHeaderWords; ++i) to[i] = words[i];
}

// Called by all threads when the blocks are encoded: the last one writes the rest of the payload.
__device__ inline void FinishPayload(const EncodeJob& job, const Place& place,
                                     const Totals& totals) {
  Control* const control = job.workspace.control;
  AddTotals(control, totals);
  if (!LastBlock(place, control) || threadIdx.x) return;
  StoreHeader(job, atomicExch(&control->nonfinite, 0u) ? kFlagNonfinite : 0);
  const Layout& layout = job.layout;
  uint32_t* const to = job.payload.As<uint32_t>();
  for (int64_t at = kHeaderBytes + 4 * layout.scales; at < layout.codes_offset; at += 4) {
    to[at / 4] = 0;
  }
  if (!layout.count) return;
  // Codes end anywhere; what they share a word with was written as zeros.
  const int64_t end = BlockOffset(layout, layout.blocks - 1) + layout.last_bytes;
  for (int64_t at = end; at < layout.payload_bytes; ++at) job.payload[at] = 0;
}

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CUDA_FINISH_H_
