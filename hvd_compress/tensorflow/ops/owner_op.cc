// An owner's work between two collectives: averages the ranks' messages with its pieces, and
// encodes the averages together with residuals of their own, which move on.
#include <chrono>
#include <string>
#include <utility>

#include "bucket.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/platform/errors.h"

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
    const BucketLayout& layout = *found->bucket->layout;
    const int64_t size = layout.own->bytes;
    Tensor* averages;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({size}), &averages));
    ledger->Count(kGatheredBytes, static_cast<double>(size));
    ledger->Count(kDistributedBytes, static_cast<double>(layout.message->bytes));
    ledger->Count(kKeptBytes, static_cast<double>(size));
    const auto kernels = ledger->KernelsOn(context);
    OP_REQUIRES_OK(context, kernels.status());
    auto* const to = averages->flat<uint8_t>().data();
    const absl::Status status = Average(context, ledger, *kernels, found->bucket.get(), to);
    if (status.ok()) return;
    ledger->Fail(absl::StrCat(kWho, status.message()));
    OP_REQUIRES_OK(context, (*kernels)->Zero(to, size));
  }

 private:
  static constexpr char kWho[] = "as its owner: ";

  absl::Status Average(OpKernelContext* context, Ledger* ledger,
                       const std::shared_ptr<Kernels>& kernels, Bucket* bucket,
                       uint8_t* averages) const {
    const Tensor& message = context->input(0);
    const BucketLayout& layout = *bucket->layout;
    const Table& table = *layout.own;
    const auto started = std::chrono::steady_clock::now();
    if (message.NumElements() != table.bytes * ranks_) {
      return errors::DataLoss(layout.labels[0], ": expected a message of ", table.bytes * ranks_,
                              " bytes, got ", message.NumElements());
    }
    int64_t count = 0;
    for (const Table::Array& array : table.arrays) count += array.count;
    Tensor average;
    TF_RETURN_IF_ERROR(context->allocate_temp(DT_FLOAT, TensorShape({count}), &average));
    Arrays arrays;
    auto* next = average.flat<float>().data();
    for (size_t i = 0; i < table.arrays.size(); next += table.Elements(i++)) {
      arrays.push_back({next, nullptr, nullptr, static_cast<uint64_t>(bucket->members[i].step),
                        HVDC_DTYPE_FLOAT32, 0});
    }
    bool nonfinite = false;  // the averages will be, too
    TF_RETURN_IF_ERROR(kernels->DecodeSum(
        {bucket->layout, layout.own, false, message.flat<uint8_t>().data(), table.bytes, ranks_},
        arrays, 1.0f / ranks_, &nonfinite));
    const auto averaged = std::chrono::steady_clock::now();
    for (Member& member : bucket->members) member.status = absl::OkStatus();
    TF_RETURN_IF_ERROR(bucket->Encode(context, ledger, kernels, table, std::move(arrays),
                                      &Member::owned, kWho, averages));
    const std::chrono::duration<double> averaging = averaged - started;
    const std::chrono::duration<double> encoding = std::chrono::steady_clock::now() - averaged;
    ledger->Count(kDecodeSeconds, averaging.count());
    ledger->Count(kEncodeSeconds, encoding.count());
    return absl::OkStatus();
  }

  int64_t bucket_;
  int ranks_;
};
HVDC_REGISTER("HvdcAverage", AverageOp, .HostMemory("ledger"));

}  // namespace
}  // namespace hvd_compress
