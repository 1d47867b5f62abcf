#include "bucket.h"

#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/platform/errors.h"

namespace hvd_compress {

using namespace tensorflow;  // NOLINT: the macros need it

namespace {

// A residual as it is, one number an element, zeros at first.
absl::Status Current(OpKernelContext* context, Kernels* kernels, const std::string& label,
                     int64_t count, Var* residual, Tensor* now) {
  {
    mutex_lock lock(*residual->mu());
    *now = *residual->tensor();
  }
  if (now->NumElements() == count && count != 0) return absl::OkStatus();
  if (now->NumElements() != 0) {
    return errors::InvalidArgument(label, ": expected a gradient of ", now->NumElements(),
                                   " elements as in the steps before, got ", count,
                                   ": make a compressor for each model");
  }
  const DataType dtype = now->dtype();
  TF_RETURN_IF_ERROR(context->allocate_temp(dtype, TensorShape({count}), now));
  return kernels->Zero(now->data(), count * DataTypeSize(dtype));
}

}  // namespace

Bucket::Bucket(std::shared_ptr<const BucketLayout> layout)
    : layout(std::move(layout)),
      members(this->layout->labels.size()),
      complete(std::make_shared<Latch>()),
      decoded(std::make_shared<Latch>()),
      missing_(members.size()) {}

void Bucket::Submit(int64_t index, Member member) {
  {
    mutex_lock lock(mutex_);
    members[index] = std::move(member);
    if (--missing_ != 0) return;
  }
  complete->Set();
}

absl::Status Bucket::Encode(OpKernelContext* context, Ledger* ledger,
                            const std::shared_ptr<Kernels>& kernels, const Table& table,
                            Arrays arrays, VariableRef Member::* residual, const char* who,
                            uint8_t* message) {
  std::vector<Tensor> before(members.size()), next(members.size());
  std::vector<bool> failed(members.size());
  const auto prepare = [&](size_t i, int64_t count) -> absl::Status {
    TF_RETURN_IF_ERROR(members[i].status);
    if (!table.arrays[i].kept) return absl::OkStatus();
    TF_RETURN_IF_ERROR(Current(context, kernels.get(), layout->labels[i], count,
                               (members[i].*residual).get(), &before[i]));
    return context->allocate_temp(before[i].dtype(), before[i].shape(), &next[i]);
  };
  for (size_t i = 0; i < table.arrays.size(); ++i) {
    const int64_t count = table.Elements(i);
    if (!table.arrays[i].used) continue;
    arrays[i].step = members[i].step;
    const absl::Status status = prepare(i, count);
    arrays[i].residual = before[i].data();
    arrays[i].next_residual = next[i].data();
    if (status.ok()) continue;
    ledger->Fail(absl::StrCat(who, status.message()));
    failed[i] = true;
    // The table has the member all the same.
    TF_RETURN_IF_ERROR(context->allocate_temp(DT_FLOAT, TensorShape({count}), &next[i]));
    arrays[i] = {next[i].data(), next[i].data(), next[i].data(), 0, HVDC_DTYPE_FLOAT32, 0};
    TF_RETURN_IF_ERROR(kernels->Zero(next[i].data(), 4 * count));
  }
  const absl::Status status = kernels->Encode(*layout, table, arrays, message);
  if (!status.ok()) {
    ledger->Fail(absl::StrCat(who, status.message()));
    return kernels->Zero(message, table.bytes);
  }
  for (size_t i = 0; i < table.entries.size(); ++i) {
    if (!failed[static_cast<size_t>(table.entries[i].array)]) continue;
    TF_RETURN_IF_ERROR(kernels->Zero(message + table.entries[i].offset, table.payloads[i]));
  }
  for (size_t i = 0; i < table.arrays.size(); ++i) {
    if (failed[i] || !table.arrays[i].kept) continue;
    VariableRef& variable = members[i].*residual;
    {
      mutex_lock lock(*variable->mu());
      *variable->tensor() = next[i];
    }
    ledger->Encoded({std::move(variable), std::move(before[i]), kernels});
  }
  return absl::OkStatus();
}

absl::StatusOr<BucketOnDevice> LookupBucket(OpKernelContext* context, int ledger_input,
                                            int64_t bucket) {
  BucketOnDevice found;
  TF_RETURN_IF_ERROR(Lookup(context, ledger_input, &found.ledger));
  found.bucket = found.ledger->bucket(bucket);
  if (found.bucket) return found;
  return errors::Internal("expected bucket ", bucket, " among those of the step, got none");
}

}  // namespace hvd_compress
