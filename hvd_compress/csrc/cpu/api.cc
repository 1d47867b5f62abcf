// The small functions of the C interface.
#include "codec/layout.h"
#include "codec/sums.h"
#include "cpu/fp_env.h"
#include "cpu/kernels.h"
#include "cpu/scratch.h"
#include "cpu/thread_pool.h"

extern "C" uint32_t hvdc_abi_version(void) { return HVDC_ABI_VERSION; }

extern "C" int64_t hvdc_payload_bytes(const hvdc_spec* spec) {
  if (!spec || !hvdc::base::ValidSpec(*spec)) return -1;
  return hvdc::base::MakeLayout(*spec).payload_bytes;
}

extern "C" double hvdc_square_sum(const float* values, int64_t count, int threads) {
  using namespace hvdc;
  // In pieces, so that the chunks' sums take little memory; a piece is what LaneSum folds at once.
  constexpr int64_t kPiece = int64_t{kChunk} * kChunk;
  constexpr int64_t kGrain = 32;  // chunks of a task
  const DefaultFpEnv env;
  const Kernels& kernels = CurrentKernels();
  double sums[kChunk];
  double total = 0;
  for (int64_t start = 0; start < count; start += kPiece) {
    const int64_t size = count - start < kPiece ? count - start : kPiece;
    const int64_t chunks = (size + kChunk - 1) / kChunk;
    ParallelFor(chunks, kGrain, ClampThreads(threads, (chunks + kGrain - 1) / kGrain),
                [&](int64_t first, int64_t last, int) {
                  kernels.square_chunks(values + start, size, first, last, sums);
                });
    total += base::LaneSum(sums, chunks);
  }
  return total;
}
