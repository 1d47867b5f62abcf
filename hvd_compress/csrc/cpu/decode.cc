// Decoding: headers are checked, then blocks are decoded while their checksums are taken.
#include <string.h>

#include "codec/header.h"
#include "cpu/jobs.h"
#include "cpu/kernels.h"
#include "cpu/scratch.h"
#include "cpu/tables.h"
#include "cpu/thread_pool.h"

namespace hvdc {
namespace {

using Work = void (*)(const DecodeJob&, int64_t, int64_t, const Scratch&, uint64_t*);

Header ReadHeader(const DecodeJob& job, int32_t index) {
  Header header;
  memcpy(&header, job.payloads + index * job.stride, sizeof(header));
  return header;
}

// The checksum of what belongs to no block: header, scales of larger groups, padding of scales.
uint64_t RestChecksum(const DecodeJob& job, const Kernels& kernels, int32_t index) {
  const uint8_t* payload = job.payloads + index * job.stride;
  const int64_t own = base::IsContiguous(*job.spec) ? 4 * job.layout.scales : 0;
  return kernels.checksum(payload, 0, kHeaderBytes - 8) +
         kernels.checksum(payload, kHeaderBytes + own, job.layout.codes_offset);
}

int Run(DecodeJob* job, uint64_t step, int64_t payload_bytes, int threads, bool back,
        int32_t* bad) {
  const hvdc_spec& spec = *job->spec;
  job->layout = base::MakeLayout(spec);
  const Layout& layout = job->layout;
  if (payload_bytes != layout.payload_bytes) return HVDC_BAD_SIZE;
  if (job->count > 1 && (job->stride < payload_bytes || job->stride % 4)) return HVDC_BAD_SIZE;
  if (job->count && !job->payloads) return HVDC_BAD_SPEC;
  for (*bad = 0; *bad < job->count; ++*bad) {
    if (!base::HeaderFits(spec, layout, static_cast<uint32_t>(step), ReadHeader(*job, *bad))) {
      return HVDC_BAD_HEADER;
    }
  }
  if (spec.codec == HVDC_INT8 && spec.variant != HVDC_LINEAR) {
    job->tables = &GetInt8Tables(spec.variant);
  }
  const Kernels& kernels = CurrentKernels();
  const Work work = back ? kernels.take_back : kernels.decode;
  threads = ClampThreads(threads, BlockTasks(layout));
  // A row of sums for each thread, a cache line apart.
  const int64_t row = (job->count + 15) / 8 * 8;
  const Buffer<uint64_t> sums(row * threads);
  if (!sums) return HVDC_NO_MEMORY;
  if (layout.count) {
    const ScratchSet scratch(layout.block, threads);
    if (!scratch) return HVDC_NO_MEMORY;
    ParallelFor(layout.blocks, BlocksPerTask(layout), threads,
                [&](int64_t first, int64_t last, int worker) {
                  work(*job, first, last, scratch.Of(worker), sums.data() + row * worker);
                });
  }
  for (*bad = 0; *bad < job->count; ++*bad) {
    uint64_t total = RestChecksum(*job, kernels, *bad);
    for (int i = 0; i < threads; ++i) total += sums[row * i + *bad];
    if (total != ReadHeader(*job, *bad).checksum) return HVDC_BAD_CHECKSUM;
  }
  *bad = -1;
  return HVDC_OK;
}

}  // namespace
}  // namespace hvdc

extern "C" int hvdc_decode_sum(const hvdc_spec* spec, uint64_t step, const void* payloads,
                               int64_t payload_bytes, int64_t stride, int32_t count, float scale,
                               void* out, int dtype, int accumulate, int threads, int32_t* bad) {
  using namespace hvdc;
  int32_t nobody;
  if (!bad) bad = &nobody;
  *bad = -1;
  if (!spec || !base::ValidSpec(*spec) || !ValidDtype(dtype) || count < 0) return HVDC_BAD_SPEC;
  DecodeJob job = {};
  job.spec = spec;
  job.payloads = static_cast<const uint8_t*>(payloads);
  job.stride = stride;
  job.count = count;
  job.scale = scale;
  job.out = out;
  job.dtype = dtype;
  job.accumulate = accumulate != 0;
  return Run(&job, step, payload_bytes, threads, false, bad);
}

extern "C" int hvdc_take_back(const hvdc_spec* spec, uint64_t step, const void* gradient, int dtype,
                              const hvdc_feedback* feedback, const void* payload,
                              int64_t payload_bytes, int threads) {
  using namespace hvdc;
  int32_t nobody;
  if (!spec || !base::ValidSpec(*spec) || !ValidDtype(dtype) || !feedback) return HVDC_BAD_SPEC;
  DecodeJob job = {};
  job.spec = spec;
  job.payloads = static_cast<const uint8_t*>(payload);
  job.count = 1;
  job.dtype = dtype;
  job.gradient = gradient;
  job.residual = feedback->residual;
  job.beta = feedback->beta;
  return Run(&job, step, payload_bytes, threads, true, &nobody);
}
