// An owner's work between two collectives: averages the ranks' messages with its pieces, and
// encodes the averages together with residuals of their own, which move on.
#include <chrono>
#include <string>
#include <utility>

#include "bucket.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/types.h"

namespace hvd_compress {
namespace {

using namespace tensorflow;  // NOLINT: the registration macros need it

// parts: the ranks' messages with payloads of this rank's pieces, one after the other. ranks: their
// number. It does not fail: the other ranks would wait for an average, and get zeros in its place.
REGISTER_OP("HvdcAverage")
    .Input("parts: uint8")
    .Input("ledger: resource")
    .Output("averages: uint8")
    .Attr("bucket: int")
    .Attr("ranks: int")
    .SetIsStateful()
    .SetShapeFn([](shape_inference::InferenceContext* c) {
      c->set_output(0, c->Vector(shape_inference::InferenceContext::kUnknownDim));
      return absl::OkStatus();
    });

class AverageOp : public OpKernel {
 public:
  explicit AverageOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("bucket", &bucket_));
    OP_REQUIRES_OK(context, context->GetAttr("ranks", &ranks_));
  }

  void Compute(OpKernelContext* context) override {
    const auto found = LookupBucket(context, 1, bucket_);
    OP_REQUIRES_OK(context, found.status());
    Ledger* const ledger = found->ledger.get();
    Bucket* const bucket = found->bucket.get();
    const int own = bucket->members[0].coder->own();
    const Bucket::Block block = bucket->blocks[own];
    Tensor* averages;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({block.size}), &averages));
    const Bucket::Block last = bucket->blocks.back();
    ledger->Count(kGatheredBytes, static_cast<double>(block.size));
    ledger->Count(kDistributedBytes, static_cast<double>(last.begin + last.size));
    ledger->Count(kKeptBytes, static_cast<double>(block.size));
    const auto kernels = KernelsFor(context, ledger, *bucket->members[0].coder);
    OP_REQUIRES_OK(context, kernels.status());
    for (Member& member : bucket->members) {
      Piece piece = member.pieces[own];
      piece.offset -= block.begin;
      if (piece.bytes > 0) {
        const absl::Status status =
            Work(context, ledger, *kernels, block.size, piece, &member, averages);
        if (!status.ok()) {
          ledger->Fail(absl::StrCat("as its owner: ", status.message()));
          uint8_t* const to = averages->flat<uint8_t>().data() + piece.offset;
          OP_REQUIRES_OK(context, (*kernels)->Zero(to, piece.bytes));
        }
      }
    }
  }

 private:
  // row: the bytes that each rank sent, in which those of the piece begin at its offset.
  absl::Status Work(OpKernelContext* context, Ledger* ledger,
                    const std::shared_ptr<Kernels>& kernels, int64_t row, const Piece& piece,
                    Member* member, Tensor* averages) const {
    const Tensor& message = context->input(0);
    const Coder& coder = *member->coder;
    Tensor average;
    TF_RETURN_IF_ERROR(context->allocate_temp(DT_FLOAT, TensorShape({piece.length}), &average));
    const auto started = std::chrono::steady_clock::now();
    if (message.NumElements() != row * ranks_) {
      return errors::DataLoss(coder.label(), ": expected a message of ", row * ranks_,
                              " bytes, got ", message.NumElements());
    }
    bool nonfinite = false;  // the average will be, too
    const auto* first = message.flat<uint8_t>().data() + piece.offset;
    TF_RETURN_IF_ERROR(
        kernels->DecodeSum({piece.spec, member->step, first, piece.bytes, row, ranks_},
                           {coder.label(), 0, false, member->step}, 1.0f / ranks_, average.data(),
                           HVDC_DTYPE_FLOAT32, &nonfinite));
    const auto averaged = std::chrono::steady_clock::now();
    Piece whole = piece;  // of the average, whose residual it has to itself
    whole.begin = 0;
    Tensor before;
    TF_RETURN_IF_ERROR(coder.Encode(context, kernels.get(), {whole}, {coder.own_stream()},
                                    member->number, member->step, average, averages,
                                    member->owned.get(), &before));
    const std::chrono::duration<double> averaging = averaged - started;
    const std::chrono::duration<double> encoding = std::chrono::steady_clock::now() - averaged;
    ledger->Count(kDecodeSeconds, averaging.count());
    ledger->Count(kEncodeSeconds, encoding.count());
    if (coder.feedback()) {
      ledger->Encoded({std::move(member->owned), std::move(before), kernels});
    }
    return absl::OkStatus();
  }

  int64_t bucket_;
  int ranks_;
};
HVDC_REGISTER("HvdcAverage", AverageOp, .HostMemory("ledger"));

}  // namespace
}  // namespace hvd_compress
