// An owner's work between two collectives: averages the ranks' messages with its pieces, and
// encodes the averages together with residuals of their own, which move on.
#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "bucket.h"
#include "cpu/fp_env.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/types.h"

namespace hvd_compress {
namespace {

using namespace tensorflow;  // NOLINT: the registration macros need it

template <typename T>
void AddAs(const uint8_t* bytes, int64_t count, float* sum) {
  const auto* numbers = reinterpret_cast<const T*>(bytes);
  for (int64_t i = 0; i < count; ++i) sum[i] += static_cast<float>(numbers[i]);
}

// parts: the ranks' messages with this rank's pieces, one after the other. what: "payloads"; or,
// within a host on the CPU, "numbers" of the gradients' types or "inner" payloads. ranks: their
// number. It does not fail: the other ranks would wait for an average, and get zeros in its
// place.
REGISTER_OP("HvdcAverage")
    .Input("parts: uint8")
    .Input("ledger: resource")
    .Output("averages: uint8")
    .Attr("bucket: int")
    .Attr("what: {'payloads', 'numbers', 'inner'}")
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
    std::string what;
    OP_REQUIRES_OK(context, context->GetAttr("what", &what));
    numbers_ = what == "numbers";
    inner_ = what == "inner";
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
    CountBytes(ledger, *bucket, own);
    const auto kernels = KernelsFor(context, ledger, *bucket->members[0].coder);
    OP_REQUIRES_OK(context, kernels.status());
    int64_t row = 0, offset = 0;  // bytes that each rank sent, and of them before the member's
    for (const Member& member : bucket->members) row += SentBytes(member, own);
    for (Member& member : bucket->members) {
      Piece piece = member.pieces[own];
      piece.offset -= block.begin;
      if (piece.bytes > 0) {
        const Parts parts{context->input(0), row, offset};
        const absl::Status status =
            Work(context, ledger, *kernels, parts, piece, &member, averages);
        if (!status.ok()) {
          ledger->Fail(absl::StrCat("as its owner: ", status.message()));
          uint8_t* const to = averages->flat<uint8_t>().data() + piece.offset;
          OP_REQUIRES_OK(context, (*kernels)->Zero(to, piece.bytes));
        }
      }
      offset += SentBytes(member, own);
    }
  }

 private:
  // The ranks' messages: rows of so many bytes, in each of which a member's begin at `offset`.
  struct Parts {
    const Tensor& message;
    int64_t row, offset;
  };

  // The bytes of one rank's piece for an owner.
  int64_t SentBytes(const Member& member, size_t owner) const {
    if (numbers_) return member.pieces[owner].length * DataTypeSize(member.gradient.dtype());
    return (inner_ ? member.inner : member.pieces)[owner].bytes;
  }

  void CountBytes(Ledger* ledger, const Bucket& bucket, int own) const {
    double sent = 0, kept = 0;
    for (const Member& member : bucket.members) {
      for (size_t i = 0; i < member.pieces.size(); ++i) {
        const auto bytes = static_cast<double>(SentBytes(member, i));
        sent += bytes;
        if (static_cast<int>(i) == own) kept += bytes;
      }
    }
    const double gathered = static_cast<double>(bucket.blocks[own].size);
    const bool on_host = numbers_ || inner_;
    ledger->Count(on_host ? kHostGatheredBytes : kGatheredBytes, gathered);
    ledger->Count(on_host ? kHostDistributedBytes : kDistributedBytes, sent);
    ledger->Count(on_host ? kHostKeptBytes : kKeptBytes, kept);
  }

  absl::Status Work(OpKernelContext* context, Ledger* ledger,
                    const std::shared_ptr<Kernels>& kernels, const Parts& parts, const Piece& piece,
                    Member* member, Tensor* averages) const {
    const Coder& coder = *member->coder;
    Tensor average;
    TF_RETURN_IF_ERROR(context->allocate_temp(DT_FLOAT, TensorShape({piece.length}), &average));
    const auto started = std::chrono::steady_clock::now();
    if (parts.message.NumElements() != parts.row * ranks_) {
      return numbers_
                 ? errors::DataLoss(coder.label(), ": expected ", parts.row * ranks_,
                                    " bytes from the ", ranks_, " ranks of the host, got ",
                                    parts.message.NumElements(),
                                    "; the own errors of the others say why")
                 : errors::DataLoss(coder.label(), ": expected a message of ", parts.row * ranks_,
                                    " bytes, got ", parts.message.NumElements());
    }
    if (numbers_) {
      AddNumbers(parts, member->gradient.dtype(), &average);
    } else {
      bool nonfinite = false;  // the average will be, too
      const auto* first = parts.message.flat<uint8_t>().data() + parts.offset;
      const Piece& sent = inner_ ? member->inner[coder.own()] : piece;
      const size_t first_rank = inner_ ? static_cast<size_t>(coder.first_rank()) : 0;
      TF_RETURN_IF_ERROR(
          kernels->DecodeSum({sent.spec, member->step, first, sent.bytes, parts.row, ranks_},
                             {coder.label(), first_rank, 1, false, member->step}, 1.0f / ranks_,
                             average.data(), HVDC_DTYPE_FLOAT32, &nonfinite));
    }
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

  void AddNumbers(const Parts& parts, DataType dtype, Tensor* average) const {
    const hvdc::DefaultFpEnv env;
    const int64_t count = average->NumElements();
    float* const sum = average->flat<float>().data();
    std::fill_n(sum, count, 0.0f);
    const uint8_t* row = parts.message.flat<uint8_t>().data() + parts.offset;
    for (int rank = 0; rank < ranks_; ++rank, row += parts.row) {
      if (dtype == DT_HALF) {
        AddAs<Eigen::half>(row, count, sum);
      } else if (dtype == DT_BFLOAT16) {
        AddAs<bfloat16>(row, count, sum);
      } else {
        AddAs<float>(row, count, sum);
      }
    }
    const float factor = 1.0f / ranks_;
    for (int64_t i = 0; i < count; ++i) sum[i] *= factor;
  }

  int64_t bucket_;
  bool numbers_, inner_;
  int ranks_;
};
HVDC_REGISTER("HvdcAverage", AverageOp, .HostMemory("ledger"));

}  // namespace
}  // namespace hvd_compress
