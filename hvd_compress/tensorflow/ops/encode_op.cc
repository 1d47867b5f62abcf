// Makes a bucket's first message, when all of its gradients have been computed.
#include <chrono>
#include <memory>
#include <utility>

#include "bucket.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/types.h"

namespace hvd_compress {
namespace {

using namespace tensorflow;  // NOLINT: the registration macros need it

// submitted: the first member's token. everybody: whether all ranks take part in the step. sizes:
// the bytes for each owner. encoded: whether the message has payloads of gradients or of pieces of
// them, and residuals moved on; if not, because a rank has joined or a gradient warms up, it holds
// the gradients as float32 numbers. ranks: the number that gather the message. length: the bytes of
// the payloads, where all ranks rely on it because they add messages up; else -1.
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
    .Attr("length: int")
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
    OP_REQUIRES_OK(context, context->GetAttr("length", &length_));
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
  absl::Status Make(OpKernelContext* context, Ledger* ledger, Bucket* bucket) const {
    bucket->LayOut();
    const bool everybody = context->input(1).scalar<bool>()();
    bool encoded = everybody;
    for (Member& member : bucket->members) {
      member.step = Exchanges(member.exchanges.get(), /*counts=*/everybody) - warmup_;
      encoded = encoded && member.step >= 0;
    }
    Tensor *message, *sizes, *flag;
    TF_RETURN_IF_ERROR(context->allocate_output(2, {}, &flag));
    flag->scalar<bool>()() = encoded;
    const auto owners = static_cast<int64_t>(bucket->blocks.size());
    TF_RETURN_IF_ERROR(context->allocate_output(1, TensorShape({owners}), &sizes));
    auto bytes = sizes->flat<int32_t>();
    for (int64_t i = 0; i < owners; ++i) {
      bytes(i) = static_cast<int32_t>(bucket->blocks[i].size);
    }
    const auto kernels = KernelsFor(context, ledger, *bucket->members[0].coder);
    if (!kernels.ok()) {
      ledger->Fail(std::string(kernels.status().message()));
      const int64_t size = encoded ? Size(*bucket) : 4 * Elements(*bucket);
      return context->allocate_output(0, TensorShape({size}), &message);
    }
    const auto started = std::chrono::steady_clock::now();
    if (!encoded) {
      TF_RETURN_IF_ERROR(Widen(context, kernels->get(), *bucket, &message));
    } else {
      TF_RETURN_IF_ERROR(Payloads(context, ledger, *kernels, bucket, &message));
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - started;
    ledger->Count(kEncodeSeconds, seconds.count());
    return absl::OkStatus();
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

  // The bytes of all payloads.
  static int64_t Size(const Bucket& bucket) {
    return bucket.blocks.back().begin + bucket.blocks.back().size;
  }

  static absl::Status Widen(OpKernelContext* context, Kernels* kernels, const Bucket& bucket,
                            Tensor** message) {
    TF_RETURN_IF_ERROR(context->allocate_output(0, TensorShape({4 * Elements(bucket)}), message));
    auto* to = (*message)->flat<uint8_t>().data();
    for (const Member& member : bucket.members) {
      const Tensor& gradient = member.gradient;
      TF_RETURN_IF_ERROR(kernels->Scale(gradient.data(), DtypeOf(gradient.dtype()),
                                        gradient.NumElements(), 1.0f, to, HVDC_DTYPE_FLOAT32));
      to += 4 * gradient.NumElements();
    }
    return absl::OkStatus();
  }

  absl::Status Payloads(OpKernelContext* context, Ledger* ledger,
                        const std::shared_ptr<Kernels>& kernels, Bucket* bucket,
                        Tensor** message) const {
    const int64_t size = Size(*bucket);
    const Member& first = bucket->members[0];
    if (first.pieces[0].bytes < 0 || size * ranks_ >= int64_t{1} << 31) {
      // Tracing checks this where it knows the shape.
      ledger->Fail(absl::StrCat(first.coder->label(), ", shape ",
                                first.gradient.shape().DebugString(),
                                ": expected fewer than 2^31 bytes in one gather, got ", ranks_,
                                " ranks times ", first.pieces[0].bytes));
      return context->allocate_output(0, TensorShape({0}), message);
    }
    if (length_ >= 0 && size != length_) {
      // Another trace, which did not know the shape.
      ledger->Fail(absl::StrCat(first.coder->label(), ": expected a gradient whose payload has ",
                                length_, " bytes, as when it was first traced, got shape ",
                                first.gradient.shape().DebugString(), ", whose payload has ",
                                size));
      TF_RETURN_IF_ERROR(context->allocate_output(0, TensorShape({length_}), message));
      return kernels->Zero((*message)->flat<uint8_t>().data(), length_);
    }
    TF_RETURN_IF_ERROR(context->allocate_output(0, TensorShape({size}), message));
    for (Member& member : bucket->members) {
      const Coder& coder = *member.coder;
      Tensor before;
      absl::Status status = coder.CheckTraced(member.gradient);
      if (status.ok()) {
        status =
            coder.Encode(context, kernels.get(), member.pieces, coder.streams(), member.number,
                         member.step, member.gradient, *message, member.residual.get(), &before);
      }
      if (!status.ok()) {
        ledger->Fail(std::string(status.message()));
        for (const Piece& piece : member.pieces) {
          uint8_t* const to = (*message)->flat<uint8_t>().data() + piece.offset;
          TF_RETURN_IF_ERROR(kernels->Zero(to, piece.bytes));
        }
        continue;
      }
      ledger->Count(kElements, static_cast<double>(member.gradient.NumElements()));
      if (coder.feedback()) {
        ledger->Encoded({std::move(member.residual), std::move(before), kernels});
      }
    }
    if (bucket->blocks.size() == 1) ledger->Count(kGatheredBytes, static_cast<double>(size));
    return absl::OkStatus();
  }

  int64_t bucket_, warmup_, ranks_, length_;
};
HVDC_REGISTER("HvdcEncode", EncodeOp,
              .HostMemory("submitted")
                  .HostMemory("everybody")
                  .HostMemory("ledger")
                  .HostMemory("sizes")
                  .HostMemory("encoded"));

}  // namespace
}  // namespace hvd_compress
