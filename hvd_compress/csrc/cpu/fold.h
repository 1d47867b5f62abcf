// A group's sums from those of its chunks.
#ifndef HVDC_CPU_FOLD_H_
#define HVDC_CPU_FOLD_H_

#include "codec/sums.h"
#include "codec/types.h"

namespace hvdc {

// The largest magnitude and the sums in double precision; sums: room for a number a chunk.
inline GroupStats FoldChunks(const GroupStats* parts, int64_t chunks, double* sums) {
  GroupStats all = parts[0];
  if (chunks == 1) return all;
  for (int64_t i = 0; i < chunks; ++i) {
    if (parts[i].largest > all.largest) all.largest = parts[i].largest;
  }
  for (int64_t i = 0; i < chunks; ++i) sums[i] = parts[i].sum;
  all.sum = base::LaneSum(sums, chunks);
  for (int64_t i = 0; i < chunks; ++i) sums[i] = parts[i].square;
  all.square = base::LaneSum(sums, chunks);
  return all;
}

}  // namespace hvdc

#endif  // HVDC_CPU_FOLD_H_
