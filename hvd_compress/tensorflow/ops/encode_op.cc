// Makes a bucket's first message, when all of its gradients have been computed.
#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>

#include "bucket.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/platform/errors.h"

namespace hvd_compress {
namespace {

using namespace tensorflow;  // NOLINT: the registration macros need it

// submitted: the first member's token. everybody: whether all ranks take part in the step. sizes:
// the bytes for each owner. encoded: whether the message has payloads of gradients or of pieces of
// them, and residuals moved on; if not, because a rank has joined or a gradient warms up, it holds
// the gradients as float32 numbers. ranks: the number that gather the message.
//
// It does not fail, because the other ranks wait for a message: they get zeros in place of
// gradients that could not be encoded, and the results fail.
REGISTER_OP("HvdcEncode")
    .Input("submitted: float")
    .Input("everybody: bool")
    .Input("ledger: resource")
    .Output("message: uint8")
    .Output("sizes: int32")
    .Output("encoded: bool")
    .Attr("bucket: int")
    .Attr("warmup: int")
    .Attr("ranks: int")
    .SetIsStateful()
    .SetShapeFn([](shape_inference::InferenceContext* c) {
      c->set_output(0, c->Vector(shape_inference::InferenceContext::kUnknownDim));
      c->set_output(1, c->Vector(shape_inference::InferenceContext::kUnknownDim));
      c->set_output(2, c->Scalar());
      return absl::OkStatus();
    });

class EncodeOp : public AsyncOpKernel {
 public:
  explicit EncodeOp(OpKernelConstruction* context) : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("bucket", &bucket_));
    OP_REQUIRES_OK(context, context->GetAttr("warmup", &warmup_));
    OP_REQUIRES_OK(context, context->GetAttr("ranks", &ranks_));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    auto found = LookupBucket(context, 2, bucket_);
    OP_REQUIRES_OK_ASYNC(context, found.status(), done);
    Ledger* const ledger = found->ledger.release();
    const std::shared_ptr<Bucket> bucket = found->bucket;
    bucket->complete->Wait(
        [this, context, ledger, bucket, done = std::move(done)](bool happened) {
          context->SetStatus(happened ? Make(context, ledger, bucket.get())
                                      : errors::Cancelled("the step was cancelled"));
          ledger->Unref();
          done();
        },
        context->cancellation_manager());
  }

 private:
  absl::Status Make(OpKernelContext* context, Ledger* ledger, Bucket* bucket) {
    const auto& entries = bucket->layout->message->entries;
    if (!entries.empty() && entries[0].spec.rows < 0) Resolve(bucket);
    const std::vector<int64_t>& sections = bucket->layout->sections;
    const bool everybody = context->input(1).scalar<bool>()();
    bool encoded = everybody;
    for (Member& member : bucket->members) {
      member.step = Exchanges(member.exchanges.get(), /*counts=*/everybody) - warmup_;
      encoded = encoded && member.step >= 0;
    }
    Tensor *message, *sizes, *flag;
    TF_RETURN_IF_ERROR(context->allocate_output(2, {}, &flag));
    flag->scalar<bool>()() = encoded;
    const auto owners = static_cast<int64_t>(sections.size());
    TF_RETURN_IF_ERROR(context->allocate_output(1, TensorShape({owners}), &sizes));
    std::copy(sections.begin(), sections.end(), sizes->flat<int32_t>().data());
    const int64_t payloads = bucket->layout->message->bytes;
    if (encoded && (payloads < 0 || payloads * ranks_ >= int64_t{1} << 31)) {
      // Tracing checks this where it knows the shape.
      ledger->Fail(absl::StrCat(bucket->layout->labels[0], ", shape ",
                                bucket->members[0].gradient.shape().DebugString(),
                                ": expected fewer than 2^31 bytes in one gather, got ", ranks_,
                                " ranks times ", payloads));
      return context->allocate_output(0, TensorShape({0}), &message);
    }
    const int64_t size = encoded ? payloads : 4 * Elements(*bucket);
    TF_RETURN_IF_ERROR(context->allocate_output(0, TensorShape({size}), &message));
    const auto kernels = ledger->KernelsOn(context);
    if (!kernels.ok()) {
      ledger->Fail(std::string(kernels.status().message()));
      return absl::OkStatus();
    }
    const auto started = std::chrono::steady_clock::now();
    auto* const to = message->flat<uint8_t>().data();
    TF_RETURN_IF_ERROR(encoded ? Payloads(context, ledger, *kernels, bucket, to)
                               : Widen(kernels->get(), *bucket, to));
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - started;
    ledger->Count(kEncodeSeconds, seconds.count());
    return absl::OkStatus();
  }

  // Gives a gradient whose shape tracing did not know a layout; the last one is kept.
  void Resolve(Bucket* bucket) {
    const TensorShape& shape = bucket->members[0].gradient.shape();
    mutex_lock lock(mutex_);
    if (unknown_ != bucket->layout || shape_ != shape) {
      hvdc_cuda_entry entry = bucket->layout->message->entries[0];
      entry.spec.rows = shape.dims() ? shape.dim_size(0) : 1;
      entry.spec.columns = 1;
      for (int i = 1; i < shape.dims(); ++i) entry.spec.columns *= shape.dim_size(i);
      const auto resolved = std::make_shared<BucketLayout>(*bucket->layout);
      resolved->message = std::make_shared<Table>(std::vector<hvdc_cuda_entry>{entry});
      resolved->sections = {resolved->message->bytes};
      unknown_ = bucket->layout;
      shape_ = shape;
      resolved_ = resolved;
    }
    bucket->layout = resolved_;
  }

  // The number of a gradient's earlier exchanges; counts one more if all ranks take part: a rank
  // that has joined counts nothing, and must not be behind the others afterwards.
  static int64_t Exchanges(Var* exchanges, bool counts) {
    mutex_lock lock(*exchanges->mu());
    const int64_t before = exchanges->tensor()->scalar<int64_t>()();
    if (!counts) return before;
    Tensor after(DT_INT64, TensorShape({}));  // a reader may still hold the old one
    after.scalar<int64_t>()() = before + 1;
    *exchanges->tensor() = after;
    return before;
  }

  static int64_t Elements(const Bucket& bucket) {
    int64_t count = 0;
    for (const Member& member : bucket.members) count += member.gradient.NumElements();
    return count;
  }

  static absl::Status Widen(Kernels* kernels, const Bucket& bucket, uint8_t* to) {
    for (const Member& member : bucket.members) {
      const Tensor& gradient = member.gradient;
      TF_RETURN_IF_ERROR(kernels->Scale(gradient.data(), DtypeOf(gradient.dtype()),
                                        gradient.NumElements(), 1.0f, to, HVDC_DTYPE_FLOAT32));
      to += 4 * gradient.NumElements();
    }
    return absl::OkStatus();
  }

  static absl::Status Payloads(OpKernelContext* context, Ledger* ledger,
                               const std::shared_ptr<Kernels>& kernels, Bucket* bucket,
                               uint8_t* to) {
    const Table& table = *bucket->layout->message;
    Arrays arrays;
    for (size_t i = 0; i < bucket->members.size(); ++i) {
      Member& member = bucket->members[i];
      const int64_t count = member.gradient.NumElements();
      arrays.push_back(
          {member.gradient.data(), nullptr, nullptr, 0, DtypeOf(member.gradient.dtype()), 0});
      ledger->Count(kElements, static_cast<double>(count));
      if (count == table.Elements(i)) continue;
      member.status = errors::InvalidArgument(bucket->layout->labels[i],
                                              ": expected a gradient of ", table.Elements(i),
                                              " elements as when it was first traced, got ", count);
    }
    if (!bucket->layout->own) ledger->Count(kGatheredBytes, static_cast<double>(table.bytes));
    return bucket->Encode(context, ledger, kernels, table, std::move(arrays), &Member::residual, "",
                          to);
  }

  int64_t bucket_, warmup_, ranks_;
  mutex mutex_;
  std::shared_ptr<const BucketLayout> unknown_, resolved_;
  TensorShape shape_;  // for which it is resolved
};
HVDC_REGISTER("HvdcEncode", EncodeOp,
              .HostMemory("submitted")
                  .HostMemory("everybody")
                  .HostMemory("ledger")
                  .HostMemory("sizes")
                  .HostMemory("encoded"));

}  // namespace
}  // namespace hvd_compress
