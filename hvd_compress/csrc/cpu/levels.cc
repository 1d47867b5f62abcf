// Integer sums: norms of a tensor, levels in lanes with norms that the ranks agree on, and their
// sums back.
#include "codec/lanes.h"
#include "codec/layout.h"
#include "codec/philox.h"
#include "codec/stats.h"
#include "cpu/fold.h"
#include "cpu/fp_env.h"
#include "cpu/jobs.h"
#include "cpu/kernels.h"
#include "cpu/scratch.h"
#include "cpu/thread_pool.h"

namespace hvdc {
namespace {

// Whether a spec has levels, and lanes of that many bits hold those of one rank at least.
bool ValidLevels(const hvdc_spec* spec, int bits) {
  if (!spec || !base::ValidSpec(*spec) || !base::HasLevels(*spec)) return false;
  if (bits < 2 || bits > kMaxLaneBits) return false;
  const uint32_t top = spec->codec == HVDC_ECQ ? spec->levels : 1;
  return top < 1u << (bits - 1);
}

int64_t WordsOf(const hvdc_spec& spec, int bits) {
  const Layout layout = base::MakeLayout(spec);
  if (!layout.count) return 0;
  const int64_t last = base::BlockElements(layout, layout.blocks - 1);
  return (layout.blocks - 1) * base::LaneWords(layout.block, bits) + base::LaneWords(last, bits);
}

// The one norm of a tensor that is one bucket.
bool WholeNorm(const EncodeJob& job, const Kernels& kernels, const ScratchSet& scratch, int threads,
               float* norm) {
  const int64_t count = job.layout.count, chunks = (count + kChunk - 1) / kChunk;
  const Buffer<GroupStats> stats(chunks);
  const Buffer<double> sums(chunks);
  if (!stats || !sums) return false;
  constexpr int64_t kGrain = 8;  // chunks of a task
  ParallelFor(chunks, kGrain, threads, [&](int64_t first, int64_t last, int worker) {
    kernels.chunk_stats(job, count, first, last, scratch.Of(worker), stats.data());
  });
  *norm = base::NormOf(*job.spec, FoldChunks(stats.data(), chunks, sums.data()), count);
  return true;
}

// Decodes a sum, or takes a residual back.
int Run(const DecodeJob& job, const LevelWords& levels, int64_t word_count, bool back,
        int threads) {
  if (word_count != WordsOf(*job.spec, levels.bits)) return HVDC_BAD_SIZE;
  if (!job.layout.count) return HVDC_OK;
  threads = ClampThreads(threads, BlockTasks(job.layout));
  const ScratchSet scratch(job.layout.block, threads);
  if (!scratch) return HVDC_NO_MEMORY;
  const DefaultFpEnv env;
  const Kernels& kernels = CurrentKernels();
  ParallelFor(job.layout.blocks, BlocksPerTask(job.layout), threads,
              [&](int64_t first, int64_t last, int worker) {
                kernels.decode_levels(job, levels, back, first, last, scratch.Of(worker));
              });
  return HVDC_OK;
}

}  // namespace
}  // namespace hvdc

extern "C" int64_t hvdc_level_words(const hvdc_spec* spec, int bits) {
  return hvdc::ValidLevels(spec, bits) ? hvdc::WordsOf(*spec, bits) : -1;
}

extern "C" int hvdc_level_norms(const hvdc_spec* spec, const void* gradient, int dtype,
                                const hvdc_feedback* feedback, float* norms, int64_t norm_count,
                                int threads) {
  using namespace hvdc;
  if (!spec || !base::ValidSpec(*spec) || !base::HasLevels(*spec) || !ValidDtype(dtype)) {
    return HVDC_BAD_SPEC;
  }
  const EncodeJob job = MakeEncodeJob(spec, gradient, dtype, feedback);
  if (norm_count != job.layout.scales) return HVDC_BAD_SIZE;
  if (!job.layout.count) return HVDC_OK;
  threads = ClampThreads(threads, BlockTasks(job.layout));
  const ScratchSet scratch(job.layout.block, threads);
  if (!scratch) return HVDC_NO_MEMORY;
  const DefaultFpEnv env;
  const Kernels& kernels = CurrentKernels();
  if (!base::IsContiguous(*spec)) {
    return WholeNorm(job, kernels, scratch, threads, norms) ? HVDC_OK : HVDC_NO_MEMORY;
  }
  ParallelFor(job.layout.blocks, BlocksPerTask(job.layout), threads,
              [&](int64_t first, int64_t last, int worker) {
                kernels.level_norms(job, first, last, scratch.Of(worker), norms);
              });
  return HVDC_OK;
}

extern "C" int hvdc_level_encode(const hvdc_spec* spec, const hvdc_noise* noise,
                                 const void* gradient, int dtype, const hvdc_feedback* feedback,
                                 const float* norms, int bits, int32_t* words, int64_t word_count,
                                 int threads) {
  using namespace hvdc;
  if (!ValidLevels(spec, bits) || !noise || !ValidDtype(dtype)) return HVDC_BAD_SPEC;
  EncodeJob job = MakeEncodeJob(spec, gradient, dtype, feedback);
  job.noise = base::MakeNoise(*noise);
  if (word_count != WordsOf(*spec, bits)) return HVDC_BAD_SIZE;
  if (!job.layout.count) return HVDC_OK;
  threads = ClampThreads(threads, BlockTasks(job.layout));
  const ScratchSet scratch(job.layout.block, threads);
  if (!scratch) return HVDC_NO_MEMORY;
  const DefaultFpEnv env;
  const Kernels& kernels = CurrentKernels();
  const LevelWords levels = {norms, bits, reinterpret_cast<uint32_t*>(words)};
  ParallelFor(job.layout.blocks, BlocksPerTask(job.layout), threads,
              [&](int64_t first, int64_t last, int worker) {
                kernels.encode_levels(job, levels, first, last, scratch.Of(worker));
              });
  return HVDC_OK;
}

extern "C" int hvdc_level_decode(const hvdc_spec* spec, const float* norms, int bits,
                                 const int32_t* words, int64_t word_count, float scale, void* out,
                                 int dtype, int threads) {
  using namespace hvdc;
  if (!ValidLevels(spec, bits) || !ValidDtype(dtype)) return HVDC_BAD_SPEC;
  DecodeJob job = {};
  job.spec = spec;
  job.layout = base::MakeLayout(*spec);
  job.scale = scale;
  job.out = out;
  job.dtype = dtype;
  // Decoding only reads them.
  const LevelWords levels = {norms, bits, reinterpret_cast<uint32_t*>(const_cast<int32_t*>(words))};
  return Run(job, levels, word_count, false, threads);
}

extern "C" int hvdc_level_take_back(const hvdc_spec* spec, const void* gradient, int dtype,
                                    const hvdc_feedback* feedback, const float* norms, int bits,
                                    const int32_t* words, int64_t word_count, int threads) {
  using namespace hvdc;
  if (!ValidLevels(spec, bits) || !ValidDtype(dtype) || !feedback) return HVDC_BAD_SPEC;
  DecodeJob job = {};
  job.spec = spec;
  job.layout = base::MakeLayout(*spec);
  job.dtype = dtype;
  job.gradient = gradient;
  job.residual = feedback->residual;
  job.beta = feedback->beta;
  const LevelWords levels = {norms, bits, reinterpret_cast<uint32_t*>(const_cast<int32_t*>(words))};
  return Run(job, levels, word_count, true, threads);
}
