// Statistics of groups that are larger than blocks, before any block is encoded: rows, columns,
// whole tensors.
#ifndef HVDC_CPU_LARGE_GROUPS_H_
#define HVDC_CPU_LARGE_GROUPS_H_

#include "cpu/kernels.h"
#include "cpu/scratch.h"

namespace hvdc {

// Writes the scales of all tensors that have large groups into their payloads, and what each one's
// groups have in common to its job.group. One number that is not finite spoils a tensor's scales.
// False where there is no memory.
bool ScaleLargeGroups(EncodeJob* jobs, int64_t tensors, const Kernels& kernels,
                      const ScratchSet& scratch, int threads);

}  // namespace hvdc

#endif  // HVDC_CPU_LARGE_GROUPS_H_
