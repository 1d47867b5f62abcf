#include "result_op.h"

#include <chrono>
#include <utility>

#include "tensorflow/core/platform/errors.h"

namespace hvd_compress {

using namespace tensorflow;  // NOLINT: the macros need it

ResultOp::ResultOp(OpKernelConstruction* context) : AsyncOpKernel(context) {
  OP_REQUIRES_OK(context, context->GetAttr("sum_scale", &sum_scale_));
}

void ResultOp::ComputeAsync(OpKernelContext* context, DoneCallback done) {
  core::RefCountPtr<Ledger> ledger;
  OP_REQUIRES_OK_ASYNC(context, LookupLedger(context, 4, &ledger), done);
  const absl::Status status = Result(context, ledger.get());
  if (status.ok()) {
    ledger->Arrived();
    done();
    return;
  }
  ledger->Fail(std::string(status.message()));
  ledger->Decoded(/*drop=*/true).IgnoreError();  // The first error is the one to tell.
  const auto end = [context, status, done = std::move(done)] {
    context->SetStatus(status);
    done();
  };
  ledger->ArrivedInVain(end, context->cancellation_manager());
}

absl::Status ResultOp::Result(OpKernelContext* context, Ledger* ledger) const {
  const std::string failure = ledger->failure();
  if (!failure.empty()) return errors::DataLoss(failure);
  const Tensor& message = context->input(0);
  const bool gathered = context->input(1).scalar<bool>()();
  const Tensor& gradient = context->input(3);
  Tensor* sum;
  TF_RETURN_IF_ERROR(context->allocate_output(0, gradient.shape(), &sum));
  const auto kernels = codec().KernelsFor(context, ledger);
  if (!kernels.ok()) return kernels.status();
  const auto started = std::chrono::steady_clock::now();
  bool drop = !gathered;
  if (gathered) {
    TF_RETURN_IF_ERROR(Decode(context, kernels->get(), message, sum, &drop));
  } else {
    TF_RETURN_IF_ERROR(Scale(kernels->get(), message, sum));
    ledger->Count(kDenseBytes, static_cast<double>(message.TotalBytes()));
  }
  TF_RETURN_IF_ERROR(ledger->Decoded(drop));
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - started;
  ledger->Count(kDecodeSeconds, seconds.count());
  return absl::OkStatus();
}

absl::Status ResultOp::Scale(Kernels* kernels, const Tensor& message, Tensor* sum) const {
  const int64_t count = sum->NumElements();
  if (message.NumElements() != count * static_cast<int64_t>(sizeof(float))) {
    return errors::DataLoss(codec().label(), ": expected a sum of ", count,
                            " float32 numbers, got ", message.NumElements(), " bytes");
  }
  return kernels->Scale(static_cast<const float*>(message.data()), count, sum_scale_, sum->data(),
                        DtypeOf(sum->dtype()));
}

}  // namespace hvd_compress
