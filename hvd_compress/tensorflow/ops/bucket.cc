#include "bucket.h"

#include <utility>

#include "cpu_kernels.h"
#include "gpu_kernels.h"
#include "tensorflow/core/platform/errors.h"

namespace hvd_compress {

using namespace tensorflow;  // NOLINT: the macros need it

Bucket::Bucket(const std::vector<double>& scales)
    : members(scales.size()),
      complete(std::make_shared<Latch>()),
      decoded(std::make_shared<Latch>()),
      missing_(scales.size()) {
  for (size_t i = 0; i < scales.size(); ++i) members[i].scale = scales[i];
}

void Bucket::Submit(int64_t index, Member member) {
  {
    mutex_lock lock(mutex_);
    member.scale = members[index].scale;
    members[index] = std::move(member);
    if (--missing_ != 0) return;
  }
  complete->Set();
}

void Bucket::LayOut() {
  blocks.clear();
  int64_t offset = 0;
  for (size_t i = 0; i < members[0].pieces.size(); ++i) {
    const int64_t begin = offset;
    for (Member& member : members) {
      member.pieces[i].offset = offset;
      offset += member.pieces[i].bytes;
    }
    blocks.push_back({begin, offset - begin});
  }
}

absl::StatusOr<BucketOnDevice> LookupBucket(OpKernelContext* context, int ledger_input,
                                            int64_t bucket) {
  BucketOnDevice found;
  TF_RETURN_IF_ERROR(Lookup(context, ledger_input, &found.ledger));
  found.bucket = found.ledger->bucket(bucket);
  if (found.bucket) return found;
  return errors::Internal("expected bucket ", bucket, " among those of the step, got none");
}

absl::StatusOr<std::shared_ptr<Kernels>> KernelsFor(OpKernelContext* context, Ledger* ledger,
                                                    const Coder& coder) {
  if (context->device()->attributes().device_type() == DEVICE_CPU) {
    return std::make_shared<CpuKernels>(coder.threads());
  }
  auto kernels = ledger->OnGpu(context);
  if (kernels.ok()) return *std::move(kernels);
  return errors::FailedPrecondition(coder.label(), ": ", kernels.status().message());
}

}  // namespace hvd_compress
