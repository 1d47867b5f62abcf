// Decodes and adds all ranks' payloads, or the averages of parts, or takes the sum that went
// uncompressed.
#include <chrono>
#include <vector>

#include "coder.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace hvd_compress {
namespace {

using namespace tensorflow;  // NOLINT: the registration macros need it

// message: the ranks' payloads one after the other or, where `gathered` is false, the float32 sum
// of their gradients. begins, lengths: the pieces of which each owner sent one payload, its
// average; none where each rank sent one of the whole gradient. scale: on the sum of the payloads
// of a piece; sum_scale: on the uncompressed sum. reduced: the token, which tells that Horovod has
// finished, too.
REGISTER_OP("HvdcDecode")
    .Input("message: uint8")
    .Input("gathered: bool")
    .Input("reduced: float")
    .Input("gradient: T")
    .Input("step: int64")
    .Input("ledger: resource")
    .Output("sum: T")
    .Attr("T: {float, half, bfloat16}")
    .Attr("label: string")
    .Attr("spec: string")
    .Attr("tensor: int")
    .Attr("threads: int")
    .Attr("alpha: float")
    .Attr("beta: float")
    .Attr("ranks: int")
    .Attr("begins: list(int)")
    .Attr("lengths: list(int)")
    .Attr("scale: float")
    .Attr("sum_scale: float")
    .SetIsStateful()
    .SetShapeFn([](shape_inference::InferenceContext* c) {
      c->set_output(0, c->input(3));
      return absl::OkStatus();
    });

class DecodeOp : public AsyncOpKernel {
 public:
  explicit DecodeOp(OpKernelConstruction* context) : AsyncOpKernel(context), coder_(context) {
    OP_REQUIRES_OK(context, context->GetAttr("ranks", &ranks_));
    OP_REQUIRES_OK(context, context->GetAttr("begins", &begins_));
    OP_REQUIRES_OK(context, context->GetAttr("lengths", &lengths_));
    OP_REQUIRES_OK(context, context->GetAttr("scale", &scale_));
    OP_REQUIRES_OK(context, context->GetAttr("sum_scale", &sum_scale_));
  }

  // Asynchronous because of its errors, which wait for the step's other gradients.
  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    core::RefCountPtr<Ledger> ledger;
    OP_REQUIRES_OK_ASYNC(context, Lookup(context, 5, &ledger), done);
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

 private:
  absl::Status Result(OpKernelContext* context, Ledger* ledger) const {
    const std::string failure = ledger->failure();
    if (!failure.empty()) return errors::DataLoss(failure);
    const Tensor& message = context->input(0);
    const bool gathered = context->input(1).scalar<bool>()();
    const Tensor& gradient = context->input(3);
    Tensor* sum;
    TF_RETURN_IF_ERROR(context->allocate_output(0, gradient.shape(), &sum));
    const auto started = std::chrono::steady_clock::now();
    bool drop = !gathered;
    if (gathered) {
      TF_RETURN_IF_ERROR(Decode(context, message, sum, &drop));
    } else {
      TF_RETURN_IF_ERROR(Scale(message, sum));
      ledger->Count(kDenseBytes, static_cast<double>(message.TotalBytes()));
    }
    TF_RETURN_IF_ERROR(ledger->Decoded(drop));
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - started;
    ledger->Count(kDecodeSeconds, seconds.count());
    return absl::OkStatus();
  }

  absl::Status Decode(OpKernelContext* context, const Tensor& message, Tensor* sum,
                      bool* nonfinite) const {
    const int64_t step = context->input(4).scalar<int64_t>()();
    if (lengths_.empty()) {
      return coder_.Decode({coder_.Whole(sum->shape())}, Source::kRanks, ranks_, scale_, step,
                           message, sum, nonfinite);
    }
    return coder_.Decode(coder_.Parts(begins_, lengths_), Source::kOwners, 1, scale_, step, message,
                         sum, nonfinite);
  }

  absl::Status Scale(const Tensor& message, Tensor* sum) const {
    const int64_t count = sum->NumElements();
    if (message.NumElements() != count * static_cast<int64_t>(sizeof(float))) {
      return errors::DataLoss(coder_.label(), ": expected a sum of ", count,
                              " float32 numbers, got ", message.NumElements(), " bytes");
    }
    const auto* values = reinterpret_cast<const float*>(message.flat<uint8_t>().data());
    switch (sum->dtype()) {
      case DT_HALF:
        return ScaleInto(values, sum->flat<Eigen::half>());
      case DT_BFLOAT16:
        return ScaleInto(values, sum->flat<bfloat16>());
      default:
        return ScaleInto(values, sum->flat<float>());
    }
  }

  template <typename Flat>
  absl::Status ScaleInto(const float* values, Flat out) const {
    for (int64_t i = 0; i < out.size(); ++i) {
      out(i) = static_cast<typename Flat::Scalar>(values[i] * sum_scale_);
    }
    return absl::OkStatus();
  }

  Coder coder_;
  std::vector<int64_t> begins_, lengths_;
  int ranks_;
  float scale_, sum_scale_;
};
REGISTER_KERNEL_BUILDER(Name("HvdcDecode").Device(DEVICE_CPU), DecodeOp);

}  // namespace
}  // namespace hvd_compress
