// Decoding: headers are checked, then the blocks of all tensors are decoded while their checksums
// are taken. Entropy-coded codes are first checked as a whole: they are few bytes, and where their
// parts stand follows from what they say.
#include <string.h>

#include "codec/rans.h"
#include "cpu/jobs.h"
#include "cpu/kernels.h"
#include "cpu/scratch.h"
#include "cpu/tasks.h"

namespace hvdc {
namespace {

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

uint64_t WholeChecksum(const DecodeJob& job, const Kernels& kernels, int32_t index,
                       int64_t length) {
  const uint8_t* payload = job.payloads + index * job.stride;
  return kernels.checksum(payload, 0, kHeaderBytes - 8) +
         kernels.checksum(payload, kHeaderBytes, length);
}

// The place of an error.
struct Culprit {
  int64_t tensor = -1;
  int32_t rank = -1;
};

bool ValidStride(const DecodeJob& job) {
  return job.count < 2 || (job.stride >= job.layout.payload_bytes && job.stride % 4 == 0);
}

// Calls fits(job, rank, index) for every payload; index counts them all. Names the first that does
// not.
template <class Fits>
bool EachPayload(const DecodeJob* jobs, int64_t tensors, Culprit* culprit, const Fits& fits) {
  int64_t index = 0;
  for (int64_t tensor = 0; tensor < tensors; ++tensor) {
    for (int32_t rank = 0; rank < jobs[tensor].count; ++rank) {
      if (fits(jobs[tensor], rank, index++)) continue;
      *culprit = {tensor, rank};
      return false;
    }
  }
  return true;
}

int64_t LengthOf(const DecodeJob& job, int32_t rank) {
  return base::PayloadLength(*job.spec, job.layout, ReadHeader(job, rank).flags);
}

// All jobs have as many payloads.
int Run(const DecodeJob* jobs, int64_t tensors, int threads, Culprit* culprit) {
  const auto fits = [](const DecodeJob& job, int32_t rank, int64_t) {
    return base::HeaderFits(*job.spec, job.layout, job.step, ReadHeader(job, rank));
  };
  if (!EachPayload(jobs, tensors, culprit, fits)) return HVDC_BAD_HEADER;
  const auto possible = [](const DecodeJob& job, int32_t rank, int64_t) {
    return LengthOf(job, rank) >= 0;
  };
  if (!EachPayload(jobs, tensors, culprit, possible)) return HVDC_BAD_CODES;
  const auto whole = [](const DecodeJob& job, int32_t rank, int64_t) {
    if (!base::IsEntropyCoded(*job.spec)) return true;
    const int64_t length = LengthOf(job, rank);
    return WholeChecksum(job, CurrentKernels(), rank, length) == ReadHeader(job, rank).checksum;
  };
  if (!EachPayload(jobs, tensors, culprit, whole)) return HVDC_BAD_CHECKSUM;
  bool coding = false;
  const auto codes_fit = [&coding](const DecodeJob& job, int32_t rank, int64_t) {
    if (!base::IsEntropyCoded(*job.spec)) return true;
    coding = true;
    if (!(ReadHeader(job, rank).flags & kFlagCoded)) return true;
    const uint8_t* const payload = job.payloads + rank * job.stride;
    return base::CodesFit(*job.spec, job.layout, payload, LengthOf(job, rank));
  };
  if (!EachPayload(jobs, tensors, culprit, codes_fit)) return HVDC_BAD_CODES;
  const Tasks<DecodeJob> tasks(jobs, tensors);
  if (!tasks) return HVDC_NO_MEMORY;
  threads = ClampThreads(threads, tasks.count());
  const ScratchSet scratch(tasks.largest_block(), threads, coding);
  // Sums of all payloads, and how many of their blocks do not decode; and those of a thread's task,
  // a cache line apart.
  const int64_t ranks = jobs[0].count, sums = 2 * ranks, row = (sums + 15) / 8 * 8;
  const Buffer<uint64_t> totals(tensors * sums + row * threads);
  if (!scratch || !totals) return HVDC_NO_MEMORY;
  const Kernels& kernels = CurrentKernels();
  tasks.Run(threads, [&](int64_t tensor, int64_t first, int64_t last, int worker) {
    uint64_t* const own = totals.data() + tensors * sums + row * worker;
    for (int64_t k = 0; k < sums; ++k) own[k] = 0;
    kernels.decode(jobs[tensor], first, last, scratch.Of(worker), own);
    // Several threads may work on one tensor.
    uint64_t* const all = totals.data() + tensor * sums;
    for (int64_t k = 0; k < sums; ++k) __atomic_fetch_add(all + k, own[k], __ATOMIC_RELAXED);
  });
  const auto sound = [&](const DecodeJob& job, int32_t rank, int64_t index) {
    if (base::IsEntropyCoded(*job.spec)) return true;
    const uint64_t total = totals[index / ranks * sums + rank];
    return total + RestChecksum(job, kernels, rank) == ReadHeader(job, rank).checksum;
  };
  if (!EachPayload(jobs, tensors, culprit, sound)) return HVDC_BAD_CHECKSUM;
  const auto decoded = [&](const DecodeJob&, int32_t rank, int64_t index) {
    return totals[index / ranks * sums + ranks + rank] == 0;
  };
  return EachPayload(jobs, tensors, culprit, decoded) ? HVDC_OK : HVDC_BAD_CODES;
}

}  // namespace
}  // namespace hvdc

extern "C" int hvdc_decode_batch(hvdc_tensor* tensors, int64_t count, const void* message,
                                 int64_t stride, int32_t ranks, float scale, int threads,
                                 int64_t* bad, int32_t* bad_rank) {
  using namespace hvdc;
  int64_t nothing;
  int32_t ignored;
  if (!bad) bad = &nothing;
  if (!bad_rank) bad_rank = &ignored;
  *bad = *bad_rank = -1;
  if (count == 0) return HVDC_OK;
  if (count < 0 || ranks < 0 || !tensors || (ranks && !ValidMessage(message))) return HVDC_BAD_SPEC;
  const Buffer<DecodeJob> jobs(count, Buffer<DecodeJob>::Fill::kNone);
  if (!jobs) return HVDC_NO_MEMORY;
  for (*bad = 0; *bad < count; ++*bad) {
    const hvdc_tensor& tensor = tensors[*bad];
    if (!ValidTensor(tensor)) return HVDC_BAD_SPEC;
    DecodeJob& job = jobs[*bad] = MakeDecodeJob(tensor, scale);
    job.payloads = static_cast<const uint8_t*>(message) + tensor.offset;
    job.stride = stride;
    job.count = ranks;
    if (!ValidPlace(tensor, job.layout.payload_bytes) || !ValidStride(job)) return HVDC_BAD_SIZE;
  }
  Culprit culprit;
  const int status = Run(jobs.data(), count, threads, &culprit);
  *bad = culprit.tensor;
  *bad_rank = culprit.rank;
  if (status != HVDC_OK) return status;
  for (int64_t i = 0; i < count; ++i) {
    uint32_t flags = 0;
    for (int32_t rank = 0; rank < ranks; ++rank) flags |= ReadHeader(jobs[i], rank).flags;
    tensors[i].flags = flags & kFlagNonfinite;
  }
  return HVDC_OK;
}
