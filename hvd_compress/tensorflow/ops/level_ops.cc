// An integer sum: this rank's norms, its levels with the norms that the ranks agreed on, and the
// result of the levels' sum.
#include <chrono>
#include <cmath>

#include "level_coder.h"
#include "result_op.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace hvd_compress {
namespace {

using namespace tensorflow;  // NOLINT: the registration macros need it

// residual and step: as of HvdcEncode. norms: one of each bucket, none while the
// gradient warms up. It does not fail, because the other ranks wait for norms: they get zeros, and
// then no levels.
REGISTER_OP("HvdcNorms")
    .Input("gradient: T")
    .Input("step: int64")
    .Input("residual: resource")
    .Input("ledger: resource")
    .Output("norms: float")
    .Attr("T: {float, half, bfloat16}")
    .Attr("label: string")
    .Attr("spec: string")
    .Attr("tensor: int")
    .Attr("threads: int")
    .Attr("alpha: float")
    .Attr("beta: float")
    .Attr("count: int")
    .Attr("buckets: int")
    .Attr("bits: int")
    .SetIsStateful()
    .SetShapeFn([](shape_inference::InferenceContext* c) {
      c->set_output(0, c->Vector(shape_inference::InferenceContext::kUnknownDim));
      return absl::OkStatus();
    });

class NormsOp : public OpKernel {
 public:
  explicit NormsOp(OpKernelConstruction* context) : OpKernel(context), coder_(context) {}

  void Compute(OpKernelContext* context) override {
    core::RefCountPtr<Var> residual;
    core::RefCountPtr<Ledger> ledger;
    OP_REQUIRES_OK(context, LookupResource(context, HandleFromInput(context, 2), &residual));
    OP_REQUIRES_OK(context, LookupLedger(context, 3, &ledger));
    const Tensor& gradient = context->input(0);
    const int64_t step = context->input(1).scalar<int64_t>()();
    Tensor* norms;
    const int64_t buckets = step < 0 ? 0 : coder_.buckets();
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({buckets}), &norms));
    ledger->Ready(static_cast<double>(gradient.TotalBytes()));
    if (step < 0) return;
    ledger->Count(kTensors, 1);
    const auto started = std::chrono::steady_clock::now();
    const absl::Status status =
        coder_.Norms(context, gradient, residual.get(), norms->flat<float>().data());
    if (!status.ok()) {
      ledger->Fail(std::string(status.message()));
      norms->flat<float>().setZero();
      return;
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - started;
    ledger->Count(kEncodeSeconds, seconds.count());
  }

 private:
  LevelCoder coder_;
};
REGISTER_KERNEL_BUILDER(Name("HvdcNorms").Device(DEVICE_CPU), NormsOp);

// words: the levels with these norms, and one word more, in which every rank counts itself. It does
// not fail, because the other ranks wait for levels: a rank that has failed sends zeros, which add
// nothing, and does not count itself.
REGISTER_OP("HvdcLevels")
    .Input("gradient: T")
    .Input("norms: float")
    .Input("step: int64")
    .Input("residual: resource")
    .Input("ledger: resource")
    .Output("words: int32")
    .Attr("T: {float, half, bfloat16}")
    .Attr("label: string")
    .Attr("spec: string")
    .Attr("tensor: int")
    .Attr("threads: int")
    .Attr("alpha: float")
    .Attr("beta: float")
    .Attr("count: int")
    .Attr("buckets: int")
    .Attr("bits: int")
    .Attr("seed: int")
    .Attr("stream: int")
    .SetIsStateful()
    .SetShapeFn([](shape_inference::InferenceContext* c) {
      c->set_output(0, c->Vector(shape_inference::InferenceContext::kUnknownDim));
      return absl::OkStatus();
    });

class LevelsOp : public OpKernel {
 public:
  explicit LevelsOp(OpKernelConstruction* context) : OpKernel(context), coder_(context) {
    OP_REQUIRES_OK(context, context->GetAttr("seed", &seed_));
    OP_REQUIRES_OK(context, context->GetAttr("stream", &stream_));
  }

  void Compute(OpKernelContext* context) override {
    core::RefCountPtr<Var> residual;
    core::RefCountPtr<Ledger> ledger;
    OP_REQUIRES_OK(context, LookupResource(context, HandleFromInput(context, 3), &residual));
    OP_REQUIRES_OK(context, LookupLedger(context, 4, &ledger));
    const Tensor &gradient = context->input(0), &norms = context->input(1);
    Tensor* words;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({coder_.words() + 1}), &words));
    ledger->Count(kDenseBytes, static_cast<double>(norms.TotalBytes() + words->TotalBytes()));
    auto to = words->flat<int32_t>();
    to.setZero();
    if (!ledger->failure().empty()) return;
    const int64_t step = context->input(2).scalar<int64_t>()();
    const auto started = std::chrono::steady_clock::now();
    const absl::Status status = coder_.Encode(context, coder_.NoiseOf(seed_, stream_, step),
                                              gradient, norms, residual.get(), to.data());
    if (!status.ok()) {
      ledger->Fail(std::string(status.message()));
      to.setZero();
      return;
    }
    to(coder_.words()) = 1;
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - started;
    ledger->Count(kEncodeSeconds, seconds.count());
    ledger->Count(kElements, static_cast<double>(gradient.NumElements()));
    if (coder_.feedback()) {
      ledger->Encoded(coder_.ToTakeBack(gradient, norms, *words, std::move(residual)));
    }
  }

 private:
  LevelCoder coder_;
  int64_t seed_, stream_;
};
REGISTER_KERNEL_BUILDER(Name("HvdcLevels").Device(DEVICE_CPU), LevelsOp);

// message: the norms that the ranks agreed on, and the sum of their words; otherwise as HvdcDecode.
REGISTER_OP("HvdcDecodeLevels")
    .Input("message: uint8")
    .Input("gathered: bool")
    .Input("reduced: float")
    .Input("gradient: T")
    .Input("ledger: resource")
    .Output("sum: T")
    .Attr("T: {float, half, bfloat16}")
    .Attr("label: string")
    .Attr("spec: string")
    .Attr("tensor: int")
    .Attr("threads: int")
    .Attr("alpha: float")
    .Attr("beta: float")
    .Attr("count: int")
    .Attr("buckets: int")
    .Attr("bits: int")
    .Attr("ranks: int")
    .Attr("scale: float")
    .Attr("sum_scale: float")
    .SetIsStateful()
    .SetShapeFn([](shape_inference::InferenceContext* c) {
      c->set_output(0, c->input(3));
      return absl::OkStatus();
    });

class DecodeLevelsOp : public ResultOp {
 public:
  explicit DecodeLevelsOp(OpKernelConstruction* context) : ResultOp(context), coder_(context) {
    OP_REQUIRES_OK(context, context->GetAttr("ranks", &ranks_));
    OP_REQUIRES_OK(context, context->GetAttr("scale", &scale_));
  }

 private:
  const GradientCodec& codec() const override { return coder_; }

  absl::Status Decode(OpKernelContext*, Kernels*, const Tensor& message, Tensor* sum,
                      bool* nonfinite) const override {
    const int64_t numbers = coder_.buckets() + coder_.words() + 1;
    if (message.NumElements() != numbers * 4) {
      return errors::DataLoss(coder_.label(), ": expected norms and levels of ", numbers * 4,
                              " bytes, got ", message.NumElements());
    }
    const auto* norms = reinterpret_cast<const float*>(message.flat<uint8_t>().data());
    const auto* words = reinterpret_cast<const int32_t*>(norms + coder_.buckets());
    const int32_t counted = words[coder_.words()];
    if (counted != ranks_) {
      return errors::DataLoss(coder_.label(), ": expected the levels of all ", ranks_,
                              " ranks, got those of ", counted,
                              "; the own errors of the others say why");
    }
    for (int64_t i = 0; i < coder_.buckets(); ++i) {
      *nonfinite = *nonfinite || std::isinf(norms[i]);
    }
    return coder_.Decode(norms, words, scale_, sum);
  }

  LevelCoder coder_;
  int ranks_;
  float scale_;
};
REGISTER_KERNEL_BUILDER(Name("HvdcDecodeLevels").Device(DEVICE_CPU), DecodeLevelsOp);

}  // namespace
}  // namespace hvd_compress
