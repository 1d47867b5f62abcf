// Statistics of groups that are larger than blocks, before any block is encoded: rows, columns,
// whole tensors.
#ifndef HVDC_CPU_LARGE_GROUPS_H_
#define HVDC_CPU_LARGE_GROUPS_H_

#include "codec/layout.h"
#include "cpu/scratch.h"
#include "cpu/tasks.h"

namespace hvdc {

// Who takes a tensor's statistics, with what memory.
struct Team {
  const Kernels* kernels;
  const ScratchSet* scratch;
  int first, threads;  // of the scratch memory's
  uint8_t* memory;     // LargeGroupBytes() for as many threads, aligned to 8
};

inline bool HasLargeGroups(const EncodeJob& job) {
  return job.layout.count && !base::IsContiguous(*job.spec) && !base::IsCast(*job.spec);
}

int64_t LargeGroupBytes(const EncodeJob& job, int threads);

// Writes the scales of a tensor that has large groups into its payload, and what they have in
// common to job->group. One number that is not finite spoils them all.
void ScaleLargeGroups(const Team& team, EncodeJob* job);

// The norm of a tensor that is one bucket.
float WholeNorm(const Team& team, const EncodeJob& job);

// Calls body(team, tensor) for all tensors that have large groups. Threads take short tensors each
// alone, several at the same time, and long ones together. False where there is no memory.
template <class Body>
bool EachWithLargeGroups(const EncodeJob* jobs, int64_t tensors, const Kernels& kernels,
                         const ScratchSet& scratch, int threads, const Body& body) {
  constexpr int64_t kAlone = 4 * kTaskElements;
  int64_t together_bytes = 0, alone_bytes = 0, alone_elements = 0;
  for (int64_t i = 0; i < tensors; ++i) {
    if (!HasLargeGroups(jobs[i])) continue;
    const bool alone = jobs[i].layout.count <= kAlone;
    const int64_t bytes = LargeGroupBytes(jobs[i], alone ? 1 : threads);
    int64_t* const most = alone ? &alone_bytes : &together_bytes;
    if (bytes > *most) *most = bytes;
    if (alone) alone_elements += jobs[i].layout.count;
  }
  if (!together_bytes && !alone_bytes) return true;
  alone_bytes = base::RoundUp(alone_bytes, 64);
  const int workers = ClampThreads(threads, alone_elements / kTaskElements);
  const int64_t bytes = workers * alone_bytes;
  const Buffer<uint8_t> memory(bytes > together_bytes ? bytes : together_bytes,
                               Buffer<uint8_t>::Fill::kNone);
  if (!memory) return false;
  if (alone_elements) {
    ParallelFor(tensors, 1, workers, [&](int64_t first, int64_t last, int worker) {
      const Team team = {&kernels, &scratch, worker, 1, memory.data() + worker * alone_bytes};
      for (int64_t i = first; i < last; ++i) {
        if (HasLargeGroups(jobs[i]) && jobs[i].layout.count <= kAlone) body(team, i);
      }
    });
  }
  if (together_bytes) {
    const Team team = {&kernels, &scratch, 0, threads, memory.data()};
    for (int64_t i = 0; i < tensors; ++i) {
      if (HasLargeGroups(jobs[i]) && jobs[i].layout.count > kAlone) body(team, i);
    }
  }
  return true;
}

}  // namespace hvdc

#endif  // HVDC_CPU_LARGE_GROUPS_H_
