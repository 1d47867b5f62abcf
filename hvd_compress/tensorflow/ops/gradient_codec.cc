#include "gradient_codec.h"

#include <cstring>

#include "cpu_kernels.h"
#include "gpu_kernels.h"
#include "ledger.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/platform/errors.h"

namespace hvd_compress {

using namespace tensorflow;  // NOLINT: the macros need it

GradientCodec::GradientCodec(OpKernelConstruction* context) {
  std::string spec;
  OP_REQUIRES_OK(context, context->GetAttr("label", &label_));
  OP_REQUIRES_OK(context, context->GetAttr("spec", &spec));
  OP_REQUIRES_OK(context, context->GetAttr("tensor", &tensor_));
  OP_REQUIRES_OK(context, context->GetAttr("threads", &threads_));
  OP_REQUIRES_OK(context, context->GetAttr("alpha", &alpha_));
  OP_REQUIRES_OK(context, context->GetAttr("beta", &beta_));
  OP_REQUIRES(context, spec.size() == sizeof(spec_),
              errors::InvalidArgument(label_, ": expected a spec of ", sizeof(spec_),
                                      " bytes, got ", spec.size()));
  std::memcpy(&spec_, spec.data(), sizeof(spec_));
  if (context->device_type() == DEVICE_CPU) cpu_ = std::make_shared<CpuKernels>(threads_);
}

absl::StatusOr<std::shared_ptr<Kernels>> GradientCodec::KernelsFor(OpKernelContext* context,
                                                                   Ledger* ledger) const {
  if (cpu_) return cpu_;
  auto kernels = ledger->OnGpu(context);
  if (!kernels.ok()) return errors::FailedPrecondition(label_, ": ", kernels.status().message());
  return *std::move(kernels);
}

absl::Status GradientCodec::CheckTraced(int64_t count, const Tensor& gradient) const {
  if (gradient.NumElements() == count) return absl::OkStatus();
  return errors::InvalidArgument(label_, ": expected a gradient of ", count,
                                 " elements as when it was first traced, got ",
                                 gradient.NumElements());
}

hvdc_spec GradientCodec::SpecOf(const TensorShape& shape) const {
  hvdc_spec spec = spec_;
  spec.rows = shape.dims() ? shape.dim_size(0) : 1;
  spec.columns = 1;
  for (int i = 1; i < shape.dims(); ++i) spec.columns *= shape.dim_size(i);
  return spec;
}

hvdc_noise GradientCodec::NoiseOf(int64_t seed, int64_t stream, int64_t step) const {
  return {static_cast<uint32_t>(seed), static_cast<uint32_t>(stream),
          static_cast<uint32_t>(tensor_), 0, static_cast<uint64_t>(step)};
}

absl::Status GradientCodec::Prepare(OpKernelContext* context, Kernels* kernels, int64_t count,
                                    Var* residual, float** numbers) const {
  *numbers = nullptr;
  if (!feedback()) return absl::OkStatus();
  Tensor* held = residual->tensor();
  const bool fresh = held->NumElements() == 0;
  if (!fresh && held->NumElements() != count) {
    return errors::InvalidArgument(label_, ": expected a gradient of ", held->NumElements(),
                                   " elements as in the steps before, got ", count,
                                   ": make a compressor for each model");
  }
  if (fresh || !held->RefCountIsOne()) {
    Tensor own;
    TF_RETURN_IF_ERROR(context->allocate_temp(DT_FLOAT, TensorShape({count}), &own));
    const int64_t bytes = count * static_cast<int64_t>(sizeof(float));
    TF_RETURN_IF_ERROR(fresh ? kernels->Zero(own.data(), bytes)
                             : kernels->Copy(own.data(), held->data(), bytes));
    *held = own;
  }
  *numbers = held->flat<float>().data();
  return absl::OkStatus();
}

int DtypeOf(DataType type) {
  switch (type) {
    case DT_HALF:
      return HVDC_DTYPE_FLOAT16;
    case DT_BFLOAT16:
      return HVDC_DTYPE_BFLOAT16;
    default:
      return HVDC_DTYPE_FLOAT32;
  }
}

}  // namespace hvd_compress
