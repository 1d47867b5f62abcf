// The operations around a step: the ledger, its beginning, uncompressed gradients, counters.
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ledger.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace hvd_compress {
namespace {

using namespace tensorflow;  // NOLINT: the registration macros need it

// An operation on a ledger, which is the input with the number kInput.
template <int kInput>
class LedgerKernel : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) final {
    core::RefCountPtr<Ledger> ledger;
    OP_REQUIRES_OK(context, Lookup(context, kInput, &ledger));
    Run(context, ledger.get());
  }

 private:
  virtual void Run(OpKernelContext* context, Ledger* ledger) = 0;
};

// threads: how many may work on one call of the CPU's kernels.
REGISTER_OP("HvdcLedger")
    .Output("ledger: resource")
    .Attr("threads: int")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape);

class LedgerOp : public OpKernel {
 public:
  explicit LedgerOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("threads", &threads_));
  }

  void Compute(OpKernelContext* context) override {
    Tensor* handle;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &handle));
    handle->scalar<ResourceHandle>()() =
        ResourceHandle::MakeRefCountingHandle(new Ledger(threads_), context->device()->name());
  }

 private:
  int threads_;
};
REGISTER_KERNEL_BUILDER(Name("HvdcLedger").Device(DEVICE_CPU), LedgerOp);

// Notes how many gradients of a graph come back in a step, as far as it has been traced.
REGISTER_OP("HvdcExpect")
    .Input("ledger: resource")
    .Input("graph: int64")
    .Input("gradients: int64")
    .SetIsStateful()
    .SetShapeFn(shape_inference::NoOutputs);

struct ExpectOp : LedgerKernel<0> {
  using LedgerKernel::LedgerKernel;
  void Run(OpKernelContext* context, Ledger* ledger) override {
    ledger->Expect(context->input(1).scalar<int64_t>()(), context->input(2).scalar<int64_t>()());
  }
};
REGISTER_KERNEL_BUILDER(Name("HvdcExpect").Device(DEVICE_CPU), ExpectOp);

// Notes the layout of a graph's bucket, as far as it has been traced: a BucketLayout. tables: the
// entries of the message, and of an owner's averages, or nothing where there are no owners.
REGISTER_OP("HvdcLayout")
    .Input("ledger: resource")
    .Input("graph: int64")
    .Input("bucket: int64")
    .Input("labels: string")
    .Input("scale: double")
    .Input("sections: int64")
    .Input("tables: string")
    .SetIsStateful()
    .SetShapeFn(shape_inference::NoOutputs);

struct LayoutOp : LedgerKernel<0> {
  using LedgerKernel::LedgerKernel;
  void Run(OpKernelContext* context, Ledger* ledger) override {
    const auto labels = context->input(3).flat<tstring>();
    const auto sections = context->input(5).flat<int64_t>();
    const auto tables = context->input(6).flat<tstring>();
    BucketLayout layout;
    layout.labels.assign(labels.data(), labels.data() + labels.size());
    layout.scale = context->input(4).scalar<double>()();
    layout.sections.assign(sections.data(), sections.data() + sections.size());
    OP_REQUIRES_OK(context, Read(tables(0), labels.size(), &layout.message));
    if (tables.size() > 1) OP_REQUIRES_OK(context, Read(tables(1), labels.size(), &layout.own));
    ledger->Expect(context->input(1).scalar<int64_t>()(),
                   static_cast<size_t>(context->input(2).scalar<int64_t>()()),
                   std::make_shared<BucketLayout>(std::move(layout)));
  }

 private:
  static absl::Status Read(const tstring& bytes, int64_t arrays,
                           std::shared_ptr<const Table>* table) {
    std::vector<hvdc_cuda_entry> entries(bytes.size() / sizeof(hvdc_cuda_entry));
    const size_t size = entries.size() * sizeof(hvdc_cuda_entry);
    if (size) std::memcpy(entries.data(), bytes.data(), size);
    bool valid = size == bytes.size();
    for (const auto& entry : entries) valid = valid && entry.array >= 0 && entry.array < arrays;
    if (!valid) return errors::InvalidArgument("expected a table of hvdc_cuda_entry");
    *table = std::make_shared<Table>(std::move(entries));
    return absl::OkStatus();
  }
};
REGISTER_KERNEL_BUILDER(Name("HvdcLayout").Device(DEVICE_CPU), LayoutOp);

// A name that tells a variable from all others of the process.
REGISTER_OP("HvdcVariable")
    .Input("variable: resource")
    .Output("name: string")
    .SetIsStateful()
    .SetShapeFn(shape_inference::ScalarShape);

class VariableOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    Tensor* name;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &name));
    name->scalar<tstring>()() = HandleFromInput(context, 0).name();
  }
};
HVDC_REGISTER("HvdcVariable", VariableOp, .HostMemory("variable").HostMemory("name"));

// Fails where a function is called with other variables than those it was traced for. names: those
// of HvdcVariable.
REGISTER_OP("HvdcSameVariables")
    .Input("variables: N * resource")
    .Attr("N: int >= 1")
    .Attr("names: list(string)")
    .SetIsStateful()
    .SetShapeFn(shape_inference::NoOutputs);

class SameVariablesOp : public OpKernel {
 public:
  explicit SameVariablesOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("names", &names_));
  }

  void Compute(OpKernelContext* context) override {
    for (int i = 0; i < context->num_inputs(); ++i) {
      const std::string& got = HandleFromInput(context, i).name();
      OP_REQUIRES(context, got == names_[i],
                  errors::InvalidArgument(
                      "expected the gradient of variable ", names_[i], ", got that of ", got,
                      ", which has the same shape: an optimizer of Horovod's under tf.function "
                      "exchanges gradients of one list of variables; use "
                      "hvd.DistributedGradientTape, made in the tf.function"));
    }
  }

 private:
  std::vector<std::string> names_;
};
HVDC_REGISTER("HvdcSameVariables", SameVariablesOp, .HostMemory("variables"));

// Starts an exchange of a graph. first: whether a step begins with it. token: a 1, on which the
// exchange's messages depend. standing: this rank's numbers in the participation check: whether its
// settings are yet to be compared, and whether it has failed.
REGISTER_OP("HvdcBegin")
    .Input("ledger: resource")
    .Output("token: float")
    .Output("standing: float")
    .Attr("graph: int")
    .Attr("first: bool")
    .SetIsStateful()
    .SetShapeFn([](shape_inference::InferenceContext* c) {
      c->set_output(0, c->Vector(1));
      c->set_output(1, c->Vector(2));
      return absl::OkStatus();
    });

class BeginOp : public LedgerKernel<0> {
 public:
  explicit BeginOp(OpKernelConstruction* context) : LedgerKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("graph", &graph_));
    OP_REQUIRES_OK(context, context->GetAttr("first", &first_));
  }

 private:
  void Run(OpKernelContext* context, Ledger* ledger) override {
    const Standing now = ledger->Begin(graph_, first_);
    Tensor *token, *standing;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({1}), &token));
    OP_REQUIRES_OK(context, context->allocate_output(1, TensorShape({2}), &standing));
    token->flat<float>()(0) = 1.0f;
    standing->flat<float>()(0) = now.agreed ? 0.0f : 1.0f;
    standing->flat<float>()(1) = now.failed ? 1.0f : 0.0f;
  }

  int64_t graph_;
  bool first_;
};
REGISTER_KERNEL_BUILDER(Name("HvdcBegin").Device(DEVICE_CPU), BeginOp);

// Tells the ledger something. agreed: the ranks' settings have been compared. compare: they have to
// be. drop_step: the last step is taken back. replaced: other residuals come in the place of those
// of the last step, which can no longer be taken back. used: the last step's gradients have been
// used, so that there is nothing to take back.
REGISTER_OP("HvdcTell")
    .Input("ledger: resource")
    .Attr("what: {'agreed', 'compare', 'drop_step', 'replaced', 'used'}")
    .SetIsStateful()
    .SetShapeFn(shape_inference::NoOutputs);

class TellOp : public LedgerKernel<0> {
 public:
  explicit TellOp(OpKernelConstruction* context) : LedgerKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("what", &what_));
  }

 private:
  void Run(OpKernelContext* context, Ledger* ledger) override {
    if (what_ == "agreed" || what_ == "compare") ledger->Agree(what_ == "agreed");
    if (what_ == "drop_step") OP_REQUIRES_OK(context, ledger->DropStep());
    if (what_ == "replaced") ledger->Replace();
    if (what_ == "used") ledger->Used();
  }

  std::string what_;
};
REGISTER_KERNEL_BUILDER(Name("HvdcTell").Device(DEVICE_CPU), TellOp);

// The error of an earlier step on this rank, or an empty string; it is told once. late: whether
// that step itself has raised no error.
REGISTER_OP("HvdcEarlierFailure")
    .Input("ledger: resource")
    .Output("message: string")
    .Output("late: bool")
    .SetIsStateful()
    .SetShapeFn([](shape_inference::InferenceContext* c) {
      c->set_output(0, c->Scalar());
      c->set_output(1, c->Scalar());
      return absl::OkStatus();
    });

struct EarlierFailureOp : LedgerKernel<0> {
  using LedgerKernel::LedgerKernel;
  void Run(OpKernelContext* context, Ledger* ledger) override {
    Tensor *message, *late;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &message));
    OP_REQUIRES_OK(context, context->allocate_output(1, {}, &late));
    const EarlierFailure failure = ledger->TakeEarlierFailure();
    message->scalar<tstring>()() = failure.message;
    late->scalar<bool>()() = failure.late;
  }
};
REGISTER_KERNEL_BUILDER(Name("HvdcEarlierFailure").Device(DEVICE_CPU), EarlierFailureOp);

// The gradient itself, counted, once the step has begun.
REGISTER_OP("HvdcUncompressed")
    .Input("gradient: T")
    .Input("token: float")
    .Input("ledger: resource")
    .Output("sent: T")
    .Attr("T: {float, half, bfloat16, double}")
    .Attr("uncompressed_item_bytes: int")
    .SetIsStateful()
    .SetShapeFn(shape_inference::UnchangedShape);

class UncompressedOp : public LedgerKernel<2> {
 public:
  explicit UncompressedOp(OpKernelConstruction* context) : LedgerKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("uncompressed_item_bytes", &item_bytes_));
  }

 private:
  void Run(OpKernelContext* context, Ledger* ledger) override {
    const Tensor& gradient = context->input(0);
    ledger->Count(kUncompressedBytes, static_cast<double>(gradient.NumElements()) * item_bytes_);
    ledger->Count(kReducedBytes, static_cast<double>(gradient.TotalBytes()));
    context->set_output(0, gradient);
  }

  int item_bytes_;
};
HVDC_REGISTER("HvdcUncompressed", UncompressedOp, .HostMemory("token").HostMemory("ledger"));

// The tensor itself, as a value that no optimization of graphs takes for a constant.
REGISTER_OP("HvdcValue")
    .Input("tensor: T")
    .Output("value: T")
    .Attr("T: type")
    .SetIsStateful()
    .SetShapeFn(shape_inference::UnchangedShape);

class ValueOp : public OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(OpKernelContext* context) override { context->set_output(0, context->input(0)); }
};
REGISTER_KERNEL_BUILDER(Name("HvdcValue").Device(DEVICE_CPU), ValueOp);
REGISTER_KERNEL_BUILDER(Name("HvdcValue").Device(DEVICE_GPU), ValueOp);

// Horovod's result for such a gradient, once it is back.
REGISTER_OP("HvdcReturned")
    .Input("reduced: T")
    .Input("ledger: resource")
    .Output("gradient: T")
    .Attr("T: {float, half, bfloat16, double}")
    .SetIsStateful()
    .SetShapeFn(shape_inference::UnchangedShape);

struct ReturnedOp : LedgerKernel<1> {
  using LedgerKernel::LedgerKernel;
  void Run(OpKernelContext* context, Ledger* ledger) override {
    context->set_output(0, context->input(0));
    ledger->Returned();
  }
};
HVDC_REGISTER("HvdcReturned", ReturnedOp, .HostMemory("ledger"));

REGISTER_OP("HvdcCounters")
    .Input("ledger: resource")
    .Output("values: double")
    .SetIsStateful()
    .SetShapeFn([](shape_inference::InferenceContext* c) {
      c->set_output(0, c->Vector(kCounters));
      return absl::OkStatus();
    });

struct CountersOp : LedgerKernel<0> {
  using LedgerKernel::LedgerKernel;
  void Run(OpKernelContext* context, Ledger* ledger) override {
    Tensor* values;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({kCounters}), &values));
    const auto counters = ledger->counters();
    std::copy(counters.begin(), counters.end(), values->flat<double>().data());
  }
};
REGISTER_KERNEL_BUILDER(Name("HvdcCounters").Device(DEVICE_CPU), CountersOp);

}  // namespace
}  // namespace hvd_compress
