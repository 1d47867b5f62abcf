// The second pass of encoding with an entropy code: plain codes that are in place become chunks.
#ifndef HVDC_CPU_ENTROPY_H_
#define HVDC_CPU_ENTROPY_H_

#include "cpu/kernels.h"
#include "cpu/scratch.h"

namespace hvdc {

class EntropyCoder {
 public:
  EntropyCoder(const EncodeJob* jobs, int64_t tensors);

  // Whether there was memory.
  explicit operator bool() const { return numbers_ && counts_; }

  // Whether any tensor's codes are to be coded.
  bool any() const { return coded_ > 0; }

  // Adds how often each code is in a part of a tensor; several threads may call it.
  void AddCounts(int64_t tensor, const uint32_t* counts) const;

  // Replaces plain codes by table, index and chunks, where that makes a payload shorter. Header and
  // scales are left alone. lengths: of each tensor, those of payloads that are shorter than their
  // capacity, else 0. Returns whether there was memory.
  bool Code(const ScratchSet& scratch, int threads, const Kernels& kernels, int64_t* lengths) const;

 private:
  uint64_t* CountsOf(int64_t tensor) const {
    return counts_.data() + kMaxAlphabet * numbers_[tensor];
  }

  const EncodeJob* const jobs_;
  const int64_t tensors_;
  const Buffer<int64_t> numbers_;  // of the tensors that are coded, -1 for the others
  const int64_t coded_;
  const Buffer<uint64_t> counts_;
};

}  // namespace hvdc

#endif  // HVDC_CPU_ENTROPY_H_
