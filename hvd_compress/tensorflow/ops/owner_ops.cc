// An owner's work between two collectives: averages what ranks sent it of its part, and encodes the
// average together with a residual of its own, which it updates in place.
#include <algorithm>
#include <chrono>
#include <utility>

#include "coder.h"
#include "cpu/fp_env.h"
#include "tensorflow/core/common_runtime/input_colocation_exemption_registry.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace hvd_compress {
namespace {

using namespace tensorflow;  // NOLINT: the registration macros need it

// parts: what the ranks sent, one after the other. residual: a float32 variable, empty until the
// first step. length: elements of the part; with none, there is nothing to do. distributed, kept:
// bytes that this rank sent to all owners, and those of them that it sent to itself. It does not
// fail: the other ranks would wait for an average, and get zeros in its place.
class OwnerOp : public OpKernel {
 public:
  // first: the counter of gathered bytes, which those of distributed and kept ones follow.
  OwnerOp(OpKernelConstruction* context, Counter first)
      : OpKernel(context), coder_(context), first_(first) {
    OP_REQUIRES_OK(context, context->GetAttr("seed", &seed_));
    OP_REQUIRES_OK(context, context->GetAttr("length", &length_));
    OP_REQUIRES_OK(context, context->GetAttr("stream", &stream_));
    OP_REQUIRES_OK(context, context->GetAttr("ranks", &ranks_));
    OP_REQUIRES_OK(context, context->GetAttr("distributed", &distributed_));
    OP_REQUIRES_OK(context, context->GetAttr("kept", &kept_));
  }

  void Compute(OpKernelContext* context) override {
    core::RefCountPtr<Var> residual;
    core::RefCountPtr<Ledger> ledger;
    OP_REQUIRES_OK(context, LookupResource(context, HandleFromInput(context, 2), &residual));
    OP_REQUIRES_OK(context, LookupLedger(context, 3, &ledger));
    std::vector<Piece> pieces = coder_.Parts({0}, {length_});
    const int64_t size = MessageBytes(pieces, 1);
    Tensor* payload;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({size}), &payload));
    ledger->Count(first_, static_cast<double>(size));
    ledger->Count(static_cast<Counter>(first_ + 1), static_cast<double>(distributed_));
    ledger->Count(static_cast<Counter>(first_ + 2), static_cast<double>(kept_));
    if (size == 0) return;
    const int64_t step = context->input(1).scalar<int64_t>()();
    Tensor average;
    OP_REQUIRES_OK(context, context->allocate_temp(DT_FLOAT, TensorShape({length_}), &average));
    const auto kernels = coder_.KernelsFor(context, ledger.get());
    const auto started = std::chrono::steady_clock::now();
    absl::Status status = kernels.status();
    if (status.ok()) {
      status = Average(kernels->get(), pieces, step, context->input(0), &average);
    }
    const auto averaged = std::chrono::steady_clock::now();
    if (status.ok()) {
      status = coder_.Encode(context, kernels->get(), pieces, {stream_}, seed_, step, average,
                             payload, residual.get());
    }
    if (!status.ok()) {
      ledger->Fail(absl::StrCat("as its owner: ", status.message()));
      if (kernels.ok()) OP_REQUIRES_OK(context, (*kernels)->Zero(payload->data(), size));
      return;
    }
    const std::chrono::duration<double> averaging = averaged - started;
    const std::chrono::duration<double> encoding = std::chrono::steady_clock::now() - averaged;
    ledger->Count(kDecodeSeconds, averaging.count());
    ledger->Count(kEncodeSeconds, encoding.count());
    if (coder_.feedback()) {
      ledger->Encoded(coder_.ToTakeBack(*kernels, std::move(pieces), step, average, *payload,
                                        std::move(residual)));
    }
  }

 protected:
  // The average of what the ranks sent of the part, which is not empty.
  virtual absl::Status Average(Kernels* kernels, const std::vector<Piece>& pieces, int64_t step,
                               const Tensor& parts, Tensor* average) const = 0;

  const Coder& coder() const { return coder_; }
  int ranks() const { return ranks_; }

 private:
  Coder coder_;
  Counter first_;
  int64_t seed_, length_, stream_, distributed_, kept_;
  int ranks_;
};

// Two shots: the parts are payloads.
REGISTER_OP("HvdcAverage")
    .Input("parts: uint8")
    .Input("step: int64")
    .Input("residual: resource")
    .Input("ledger: resource")
    .Output("average: uint8")
    .Attr("label: string")
    .Attr("spec: string")
    .Attr("tensor: int")
    .Attr("threads: int")
    .Attr("alpha: float")
    .Attr("beta: float")
    .Attr("seed: int")
    .Attr("length: int")
    .Attr("stream: int")
    .Attr("ranks: int")
    .Attr("distributed: int")
    .Attr("kept: int")
    .SetIsStateful()
    .SetShapeFn([](shape_inference::InferenceContext* c) {
      c->set_output(0, c->Vector(shape_inference::InferenceContext::kUnknownDim));
      return absl::OkStatus();
    });

class AverageOp : public OwnerOp {
 public:
  explicit AverageOp(OpKernelConstruction* context) : OwnerOp(context, kGatheredBytes) {}

 private:
  absl::Status Average(Kernels* kernels, const std::vector<Piece>& pieces, int64_t step,
                       const Tensor& parts, Tensor* average) const override {
    bool nonfinite = false;  // the average will be, too
    return coder().Decode(kernels, pieces, Source::kRanks, ranks(), 1.0f / ranks(), step, parts,
                          average, &nonfinite);
  }
};
REGISTER_KERNEL_BUILDER(Name("HvdcAverage").Device(DEVICE_CPU), AverageOp);
REGISTER_KERNEL_BUILDER(Name("HvdcAverage")
                            .Device(DEVICE_GPU)
                            .HostMemory("step")
                            .HostMemory("residual")
                            .HostMemory("ledger"),
                        AverageOp);
REGISTER_INPUT_COLOCATION_EXEMPTION("HvdcAverage");

// Within a host, on the CPU: the parts are numbers of type T.
REGISTER_OP("HvdcAverageNumbers")
    .Input("parts: uint8")
    .Input("step: int64")
    .Input("residual: resource")
    .Input("ledger: resource")
    .Output("average: uint8")
    .Attr("T: {float, half, bfloat16}")
    .Attr("label: string")
    .Attr("spec: string")
    .Attr("tensor: int")
    .Attr("threads: int")
    .Attr("alpha: float")
    .Attr("beta: float")
    .Attr("seed: int")
    .Attr("length: int")
    .Attr("stream: int")
    .Attr("ranks: int")
    .Attr("distributed: int")
    .Attr("kept: int")
    .SetIsStateful()
    .SetShapeFn([](shape_inference::InferenceContext* c) {
      c->set_output(0, c->Vector(shape_inference::InferenceContext::kUnknownDim));
      return absl::OkStatus();
    });

template <typename T>
class AverageNumbersOp : public OwnerOp {
 public:
  explicit AverageNumbersOp(OpKernelConstruction* context) : OwnerOp(context, kHostGatheredBytes) {}

 private:
  absl::Status Average(Kernels*, const std::vector<Piece>&, int64_t, const Tensor& parts,
                       Tensor* average) const override {
    const int64_t count = average->NumElements();
    const int64_t bytes = ranks() * count * static_cast<int64_t>(sizeof(T));
    if (parts.NumElements() != bytes) {
      return errors::DataLoss(coder().label(), ": expected ", bytes, " bytes from the ", ranks(),
                              " ranks of the host, got ", parts.NumElements(),
                              "; the own errors of the others say why");
    }
    const hvdc::DefaultFpEnv env;
    const auto* row = reinterpret_cast<const T*>(parts.flat<uint8_t>().data());
    float* sum = average->flat<float>().data();
    std::fill(sum, sum + count, 0.0f);
    for (int rank = 0; rank < ranks(); ++rank, row += count) {
      for (int64_t i = 0; i < count; ++i) sum[i] += static_cast<float>(row[i]);
    }
    const float factor = 1.0f / ranks();
    for (int64_t i = 0; i < count; ++i) sum[i] *= factor;
    return absl::OkStatus();
  }
};
#define HVDC_REGISTER(T)                                                                        \
  REGISTER_KERNEL_BUILDER(Name("HvdcAverageNumbers").Device(DEVICE_CPU).TypeConstraint<T>("T"), \
                          AverageNumbersOp<T>)
HVDC_REGISTER(float);
HVDC_REGISTER(Eigen::half);
HVDC_REGISTER(bfloat16);
#undef HVDC_REGISTER

}  // namespace
}  // namespace hvd_compress
