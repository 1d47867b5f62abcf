// Encoding: statistics where groups are larger than blocks, then the blocks of all tensors, then
// the entropy code, then headers.
#include <string.h>

#include "cpu/entropy.h"
#include "cpu/fp_env.h"
#include "cpu/jobs.h"
#include "cpu/kernels.h"
#include "cpu/large_groups.h"
#include "cpu/scratch.h"
#include "cpu/tasks.h"

namespace hvdc {
namespace {

// Header and whatever stands between it and the codes that no block has summed. length: of a
// payload whose codes are entropy coded, of which nothing has been summed; else 0.
void FinishPayload(const Kernels& kernels, const EncodeJob& job, const EncodeResult& result,
                   int64_t length) {
  const Layout& layout = job.layout;
  Header header = base::MakeHeader(*job.spec, layout, job.step);
  header.flags = result.nonfinite ? kFlagNonfinite : 0;
  if (length) {
    header.flags |= kFlagCoded | static_cast<uint32_t>(length / kLengthUnit) << kLengthShift;
  }
  memcpy(job.payload, &header, sizeof(header));
  const int64_t scales_end = kHeaderBytes + 4 * layout.scales;
  memset(job.payload + scales_end, 0, static_cast<size_t>(layout.codes_offset - scales_end));
  if (length) {
    header.checksum = kernels.checksum(job.payload, 0, length);
  } else {
    const bool summed = base::IsContiguous(*job.spec);
    const int64_t end = summed ? kHeaderBytes : layout.codes_offset;
    header.checksum = result.checksum + kernels.checksum(job.payload, 0, end);
  }
  memcpy(job.payload, &header, sizeof(header));
}

int Encode(EncodeJob* jobs, EncodeResult* results, int64_t count, int threads) {
  const Tasks<EncodeJob> tasks(jobs, count);
  if (!tasks) return HVDC_NO_MEMORY;
  threads = ClampThreads(threads, tasks.count());
  const EntropyCoder entropy(jobs, count);
  const Buffer<int64_t> lengths(count);
  if (!entropy || !lengths) return HVDC_NO_MEMORY;
  const ScratchSet scratch(tasks.largest_block(), threads, entropy.any());
  if (!scratch) return HVDC_NO_MEMORY;
  StreamResiduals(jobs, count);
  const DefaultFpEnv env;
  const Kernels& kernels = CurrentKernels();
  if (!ScaleLargeGroups(jobs, count, kernels, scratch, threads)) return HVDC_NO_MEMORY;
  tasks.Run(threads, [&](int64_t tensor, int64_t first, int64_t last, int worker) {
    EncodeResult part = {};
    const Scratch own = scratch.Of(worker);
    const bool coded = base::IsEntropyCoded(*jobs[tensor].spec);
    if (coded) memset(own.counts, 0, sizeof(uint32_t) * kMaxAlphabet);
    kernels.encode(jobs[tensor], first, last, own, &part);
    if (coded) entropy.AddCounts(tensor, own.counts);
    // Several threads may work on one tensor.
    EncodeResult* const all = &results[tensor];
    __atomic_fetch_add(&all->checksum, part.checksum, __ATOMIC_RELAXED);
    if (part.nonfinite) __atomic_store_n(&all->nonfinite, true, __ATOMIC_RELAXED);
  });
  if (entropy.any() && !entropy.Code(scratch, threads, kernels, lengths.data())) {
    return HVDC_NO_MEMORY;
  }
  for (int64_t i = 0; i < count; ++i) FinishPayload(kernels, jobs[i], results[i], lengths[i]);
  return HVDC_OK;
}

}  // namespace
}  // namespace hvdc

extern "C" int hvdc_encode_batch(hvdc_tensor* tensors, int64_t count, void* message, int threads,
                                 int64_t* bad) {
  using namespace hvdc;
  int64_t ignored;
  if (!bad) bad = &ignored;
  *bad = -1;
  if (count == 0) return HVDC_OK;
  if (count < 0 || !tensors || !ValidMessage(message)) return HVDC_BAD_SPEC;
  const Buffer<EncodeJob> jobs(count, Buffer<EncodeJob>::Fill::kNone);
  const Buffer<EncodeResult> results(count);
  if (!jobs || !results) return HVDC_NO_MEMORY;
  for (*bad = 0; *bad < count; ++*bad) {
    const hvdc_tensor& tensor = tensors[*bad];
    if (!ValidTensor(tensor)) return HVDC_BAD_SPEC;
    EncodeJob& job = jobs[*bad];
    job = MakeEncodeJob(tensor);
    if (!ValidPlace(tensor, job.layout.payload_bytes)) return HVDC_BAD_SIZE;
    job.payload = static_cast<uint8_t*>(message) + tensor.offset;
  }
  *bad = -1;
  const int status = Encode(jobs.data(), results.data(), count, threads);
  if (status != HVDC_OK) return status;
  for (int64_t i = 0; i < count; ++i) tensors[i].flags = results[i].nonfinite ? kFlagNonfinite : 0;
  return HVDC_OK;
}
