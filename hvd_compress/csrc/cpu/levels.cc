// Integer sums: norms of tensors, levels in lanes with norms that the ranks agree on, and their
// sums back.
#include "codec/layout.h"
#include "cpu/fp_env.h"
#include "cpu/jobs.h"
#include "cpu/kernels.h"
#include "cpu/large_groups.h"
#include "cpu/scratch.h"
#include "cpu/tasks.h"

namespace hvdc {
namespace {

// Whether lanes of that many bits hold the levels of one rank at least, of a valid spec.
bool HoldLevels(const hvdc_spec& spec, int bits) {
  if (!base::HasLevels(spec) || bits < 2 || bits > kMaxLaneBits) return false;
  const uint32_t top = spec.codec == HVDC_ECQ ? spec.levels : 1;
  return top < 1u << (bits - 1);
}

int64_t WordsOf(const Layout& layout, int bits) {
  if (!layout.count) return 0;
  const int64_t last = base::BlockElements(layout, layout.blocks - 1);
  return (layout.blocks - 1) * base::LaneWords(layout.block, bits) + base::LaneWords(last, bits);
}

bool ValidNorms(const hvdc_tensor& tensor, const Layout& layout, const float* norms) {
  return tensor.norm_count == layout.scales && tensor.norm_offset >= 0 && (norms || !layout.scales);
}

bool ValidWords(const hvdc_tensor& tensor, const Layout& layout, const void* message) {
  const int64_t bytes = 4 * WordsOf(layout, tensor.bits);
  return ValidPlace(tensor, bytes) && (!bytes || ValidMessage(message));
}

const float* NormsOf(const hvdc_tensor& tensor, const float* norms) {
  return norms ? norms + tensor.norm_offset : nullptr;
}

LevelWords WordsAt(const hvdc_tensor& tensor, const float* norms, const void* message) {
  // Decoding only reads them.
  uint8_t* words = static_cast<uint8_t*>(const_cast<void*>(message));
  if (words) words += tensor.offset;
  return {NormsOf(tensor, norms), tensor.bits, reinterpret_cast<uint32_t*>(words)};
}

// Whether an array can be one of tensors; *bad is made to point to something.
bool ValidArray(const hvdc_tensor* tensors, int64_t count, int64_t** bad, int64_t* ignored) {
  if (!*bad) *bad = ignored;
  **bad = -1;
  return count == 0 || (count > 0 && tensors);
}

}  // namespace
}  // namespace hvdc

extern "C" int64_t hvdc_level_words(const hvdc_spec* spec, int bits) {
  using namespace hvdc;
  if (!spec || !base::ValidSpec(*spec) || !HoldLevels(*spec, bits)) return -1;
  return WordsOf(base::MakeLayout(*spec), bits);
}

extern "C" int hvdc_level_norms_batch(hvdc_tensor* tensors, int64_t count, float* norms,
                                      int threads, int64_t* bad) {
  using namespace hvdc;
  int64_t ignored;
  if (!ValidArray(tensors, count, &bad, &ignored)) return HVDC_BAD_SPEC;
  const Buffer<EncodeJob> jobs(count, Buffer<EncodeJob>::Fill::kNone);
  if (!jobs) return HVDC_NO_MEMORY;
  for (*bad = 0; *bad < count; ++*bad) {
    const hvdc_tensor& tensor = tensors[*bad];
    if (!ValidTensor(tensor) || !base::HasLevels(tensor.spec)) return HVDC_BAD_SPEC;
    jobs[*bad] = MakeEncodeJob(tensor);
    if (!ValidNorms(tensor, jobs[*bad].layout, norms)) return HVDC_BAD_SIZE;
  }
  *bad = -1;
  const Tasks<EncodeJob> tasks(jobs.data(), count);
  if (!tasks) return HVDC_NO_MEMORY;
  threads = ClampThreads(threads, tasks.count());
  const ScratchSet scratch(tasks.largest_block(), threads);
  if (!scratch) return HVDC_NO_MEMORY;
  const DefaultFpEnv env;
  const Kernels& kernels = CurrentKernels();
  const auto whole = [&](const Team& team, int64_t i) {
    norms[tensors[i].norm_offset] = WholeNorm(team, jobs[i]);
  };
  if (!EachWithLargeGroups(jobs.data(), count, kernels, scratch, threads, whole)) {
    return HVDC_NO_MEMORY;
  }
  tasks.Run(threads, [&](int64_t tensor, int64_t first, int64_t last, int worker) {
    if (HasLargeGroups(jobs[tensor])) return;
    kernels.level_norms(jobs[tensor], first, last, scratch.Of(worker),
                        norms + tensors[tensor].norm_offset);
  });
  return HVDC_OK;
}

extern "C" int hvdc_level_encode_batch(hvdc_tensor* tensors, int64_t count, const float* norms,
                                       void* message, int threads, int64_t* bad) {
  using namespace hvdc;
  int64_t ignored;
  if (!ValidArray(tensors, count, &bad, &ignored)) return HVDC_BAD_SPEC;
  const Buffer<EncodeJob> jobs(count, Buffer<EncodeJob>::Fill::kNone);
  const Buffer<LevelWords> levels(count, Buffer<LevelWords>::Fill::kNone);
  if (!jobs || !levels) return HVDC_NO_MEMORY;
  for (*bad = 0; *bad < count; ++*bad) {
    const hvdc_tensor& tensor = tensors[*bad];
    if (!ValidTensor(tensor) || !HoldLevels(tensor.spec, tensor.bits)) return HVDC_BAD_SPEC;
    const EncodeJob& job = jobs[*bad] = MakeEncodeJob(tensor);
    if (!ValidNorms(tensor, job.layout, norms)) return HVDC_BAD_SIZE;
    if (!ValidWords(tensor, job.layout, message)) return HVDC_BAD_SIZE;
    levels[*bad] = WordsAt(tensor, norms, message);
  }
  *bad = -1;
  const Tasks<EncodeJob> tasks(jobs.data(), count);
  if (!tasks) return HVDC_NO_MEMORY;
  threads = ClampThreads(threads, tasks.count());
  const ScratchSet scratch(tasks.largest_block(), threads);
  if (!scratch) return HVDC_NO_MEMORY;
  StreamResiduals(jobs.data(), count);
  const DefaultFpEnv env;
  const Kernels& kernels = CurrentKernels();
  tasks.Run(threads, [&](int64_t tensor, int64_t first, int64_t last, int worker) {
    kernels.encode_levels(jobs[tensor], levels[tensor], first, last, scratch.Of(worker));
  });
  return HVDC_OK;
}

extern "C" int hvdc_level_decode_batch(hvdc_tensor* tensors, int64_t count, const float* norms,
                                       const void* message, float scale, int threads,
                                       int64_t* bad) {
  using namespace hvdc;
  int64_t ignored;
  if (!ValidArray(tensors, count, &bad, &ignored)) return HVDC_BAD_SPEC;
  const Buffer<DecodeJob> jobs(count, Buffer<DecodeJob>::Fill::kNone);
  const Buffer<LevelWords> levels(count, Buffer<LevelWords>::Fill::kNone);
  if (!jobs || !levels) return HVDC_NO_MEMORY;
  for (*bad = 0; *bad < count; ++*bad) {
    const hvdc_tensor& tensor = tensors[*bad];
    if (!ValidTensor(tensor) || !HoldLevels(tensor.spec, tensor.bits)) return HVDC_BAD_SPEC;
    const DecodeJob& job = jobs[*bad] = MakeDecodeJob(tensor, scale);
    if (!ValidNorms(tensor, job.layout, norms)) return HVDC_BAD_SIZE;
    if (!ValidWords(tensor, job.layout, message)) return HVDC_BAD_SIZE;
    levels[*bad] = WordsAt(tensor, norms, message);
  }
  *bad = -1;
  const Tasks<DecodeJob> tasks(jobs.data(), count);
  if (!tasks) return HVDC_NO_MEMORY;
  threads = ClampThreads(threads, tasks.count());
  const ScratchSet scratch(tasks.largest_block(), threads);
  if (!scratch) return HVDC_NO_MEMORY;
  const Kernels& kernels = CurrentKernels();
  tasks.Run(threads, [&](int64_t tensor, int64_t first, int64_t last, int worker) {
    kernels.decode_levels(jobs[tensor], levels[tensor], first, last, scratch.Of(worker));
  });
  return HVDC_OK;
}
