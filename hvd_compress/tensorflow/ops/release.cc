#include "release.h"

#include <utility>

#include "gradient_codec.h"
#include "tensorflow/core/platform/errors.h"

namespace hvd_compress {

using namespace tensorflow;  // NOLINT: the macros need it

namespace {

Tensor Held(Var* variable) {
  mutex_lock lock(*variable->mu());
  return *variable->tensor();
}

void Hold(Var* variable, const Tensor& value) {
  mutex_lock lock(*variable->mu());
  *variable->tensor() = value;
}

}  // namespace

Release::Release(OpKernelConstruction* context) {
  OP_REQUIRES_OK(context, context->GetAttr("label", &label_));
  OP_REQUIRES_OK(context, context->GetAttr("begins", &begins_));
  OP_REQUIRES_OK(context, context->GetAttr("weights", &weights_));
  OP_REQUIRES(
      context,
      begins_.size() == weights_.size() &&
          static_cast<size_t>(context->num_inputs()) >= begins_.size(),
      errors::InvalidArgument(label_, ": expected as many variables as begins and weights"));
}

template <typename T>
absl::Status Release::Add(OpKernelContext* context, const Tensor& gradient, Ledger* ledger,
                          Tensor* released) const {
  *released = gradient;
  const int first = context->num_inputs() - static_cast<int>(begins_.size());
  bool own = false;  // the memory that is added to
  for (size_t i = 0; i < begins_.size(); ++i) {
    core::RefCountPtr<Var> variable;
    const int input = first + static_cast<int>(i);
    TF_RETURN_IF_ERROR(LookupResource(context, HandleFromInput(context, input), &variable));
    const Tensor held = Held(variable.get());
    const int64_t count = held.NumElements();
    if (count == 0) continue;
    if (begins_[i] + count > gradient.NumElements()) {
      ledger->Fail(absl::StrCat(label_, ": expected a gradient of ", begins_[i] + count,
                                " elements or more, as in the steps before, got ",
                                gradient.NumElements(), ": make a compressor for each model"));
      continue;
    }
    if (!own) {
      TF_RETURN_IF_ERROR(context->allocate_temp(gradient.dtype(), gradient.shape(), released));
      released->flat<T>() = gradient.flat<T>();
      own = true;
    }
    const float* from = held.flat<float>().data();
    T* to = released->flat<T>().data() + begins_[i];
    for (int64_t j = 0; j < count; ++j) {
      to[j] = static_cast<T>(static_cast<float>(to[j]) + weights_[i] * from[j]);
    }
    Hold(variable.get(), Tensor(DT_FLOAT, TensorShape({0})));
    ledger->Encoded([variable = std::move(variable), held](When when) {
      // The host has seen all flags: what has to be taken back is taken back at once.
      if (when == When::kNow) Hold(variable.get(), held);
      return absl::OkStatus();
    });
  }
  return absl::OkStatus();
}

#define HVDC_INSTANTIATE(T) \
  template absl::Status Release::Add<T>(OpKernelContext*, const Tensor&, Ledger*, Tensor*) const
HVDC_INSTANTIATE(float);
HVDC_INSTANTIATE(Eigen::half);
HVDC_INSTANTIATE(bfloat16);
#undef HVDC_INSTANTIATE

}  // namespace hvd_compress
