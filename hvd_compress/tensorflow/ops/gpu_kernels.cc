#include "gpu_kernels.h"

#include <atomic>

#include "tensorflow/core/platform/errors.h"

namespace hvd_compress {

using namespace tensorflow;  // NOLINT: the macros need it

// A plan of the library, and its memory on the device.
struct Table::Plan {
  explicit Plan(const CudaFunctions* cuda) : cuda(cuda) {}
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  ~Plan() { cuda->plan_free(plan); }

  const CudaFunctions* const cuda;
  hvdc_cuda_plan* plan = nullptr;
  Tensor memory;
};

namespace {

constexpr int64_t kAlignment = 256;
constexpr size_t kRemembered = 256;  // calls
constexpr int kEntryBits = 32;       // of an error's tag: the others are the call's number

using Memory = stream_executor::DeviceMemoryBase;

std::atomic<const CudaFunctions*> functions = nullptr;

}  // namespace

absl::StatusOr<std::shared_ptr<GpuKernels>> GpuKernels::For(OpKernelContext* context) {
  if (functions == nullptr) {
    return errors::FailedPrecondition(
        "expected an opened libhvdc_cuda.so for gradients on a GPU, got none: make the compressor "
        "with device=\"GPU:0\"");
  }
  const DeviceContext* const device = context->op_device_context();
  const auto* const info = context->device()->tensorflow_accelerator_device_info();
  if (device == nullptr || device->stream() == nullptr || info == nullptr || info->gpu_id < 0) {
    return errors::FailedPrecondition("expected a GPU with a stream, got ",
                                      context->device()->name());
  }
  std::shared_ptr<GpuKernels> kernels(new GpuKernels);
  kernels->cuda_ = functions;
  kernels->stream_ = device->stream();
  kernels->allocator_ = context->device()->GetAllocator(AllocatorAttributes());
  kernels->ordinal_ = info->gpu_id;
  TF_RETURN_IF_ERROR(kernels->Allocate(sizeof(uint32_t), &kernels->flags_));
  AllocatorAttributes pinned;
  pinned.set_on_host(true);
  pinned.set_gpu_compatible(true);
  Tensor error;
  TF_RETURN_IF_ERROR(context->allocate_temp(
      DT_UINT8, TensorShape({int64_t{sizeof(hvdc_cuda_error)}}), &error, pinned));
  // Never freed: when a compressor goes, some of its work may still be to come.
  kernels->error_ = static_cast<hvdc_cuda_error*>((new Tensor(error))->data());
  *kernels->error_ = {};
  return kernels;
}

bool GpuKernels::Serve(OpKernelContext* context) const {
  const DeviceContext* const device = context->op_device_context();
  return device != nullptr && device->stream() == stream_;
}

void GpuKernels::BeginStep() {
  mutex_lock lock(mutex_);
  flags_are_of_this_step_ = false;
}

std::string GpuKernels::TakeError() {
  mutex_lock lock(mutex_);
  volatile hvdc_cuda_error* const met = error_;  // the device writes the status last
  const uint32_t status = met->status;
  if (status == HVDC_OK) return "";
  const uint64_t tag = met->tag;
  const auto call = calls_.find(tag >> kEntryBits);
  const int64_t entry = static_cast<uint32_t>(tag);
  const std::string told =
      call == calls_.end()
          ? absl::StrCat("a gradient: decoding failed with status ", status)
          : std::string(call->second.Altered(entry, met->payload, status).message());
  met->status = HVDC_OK;
  return absl::StrCat(told, "; its result was NaN");
}

absl::Status GpuKernels::Zero(void* memory, int64_t bytes) {
  if (bytes == 0) return absl::OkStatus();
  Memory device(memory, bytes);
  return stream_->MemZero(&device, bytes);
}

absl::Status GpuKernels::Encode(const BucketLayout&, const Table& table, const Arrays& arrays,
                                void* message) {
  mutex_lock lock(mutex_);
  return Launch(table, arrays, message);
}

absl::Status GpuKernels::DecodeSum(const Messages& messages, const Arrays& arrays, float scale,
                                   bool*) {
  mutex_lock lock(mutex_);
  return Sum(messages, arrays, scale, true);
}

absl::Status GpuKernels::FlagNonfinite(const void* halves, int64_t count, bool*) {
  if (count == 0) return absl::OkStatus();
  // The codec keeps all of their bits, and its payload has a flag.
  Tensor same;
  TF_RETURN_IF_ERROR(Allocate(count * static_cast<int64_t>(sizeof(uint16_t)), &same));
  return Pass(HVDC_FP16, "a sum in float16", halves, HVDC_DTYPE_FLOAT16, count, 1, same.data(),
              HVDC_DTYPE_FLOAT16, true);
}

absl::Status GpuKernels::RestoreIfFlagged(const void* before, void* after, int dtype,
                                          int64_t count) {
  mutex_lock lock(mutex_);
  if (!flags_are_of_this_step_) return absl::OkStatus();  // Nothing has been decoded.
  const hvdc_cuda_queue queue = Queue();
  const hvdc_cuda_residual one = {before, after, count, dtype, 0};
  return Check(cuda_->restore(&one, 1, flags(), &queue), "restoring a residual");
}

absl::Status GpuKernels::Scale(const void* numbers, int from, int64_t count, float scale, void* out,
                               int to) {
  // The codec keeps all bits: such steps are rare.
  return Pass(HVDC_FP32, "an uncompressed sum", numbers, from, count, scale, out, to, false);
}

absl::Status GpuKernels::Pass(uint32_t codec, const char* what, const void* numbers, int from,
                              int64_t count, float scale, void* out, int to, bool flagged) {
  mutex_lock lock(mutex_);
  std::shared_ptr<BucketLayout>& layout = passes_[{codec, count}];
  if (!layout) {
    hvdc_cuda_entry entry = {};
    entry.spec.codec = codec;
    entry.spec.rows = count;
    entry.spec.columns = 1;
    const auto table = std::make_shared<Table>(std::vector<hvdc_cuda_entry>{entry});
    layout = std::make_shared<BucketLayout>(BucketLayout{{what}, 1, {table->bytes}, table, {}});
  }
  const Table& table = *layout->message;
  Tensor payload;
  TF_RETURN_IF_ERROR(Allocate(table.bytes, &payload));
  hvdc_cuda_array array = {const_cast<void*>(numbers), nullptr, nullptr, 0, from, 0};
  TF_RETURN_IF_ERROR(Launch(table, {array}, payload.data()));
  array.values = out;
  array.dtype = to;
  const auto* const first = static_cast<const uint8_t*>(payload.data());
  return Sum({layout, layout->message, false, first, table.bytes, 1}, {array}, scale, flagged);
}

absl::StatusOr<const hvdc_cuda_plan*> GpuKernels::PlanOf(const Table& table, int messages) {
  if (!flags_are_of_this_step_) {
    TF_RETURN_IF_ERROR(Zero(flags(), sizeof(uint32_t)));
    flags_are_of_this_step_ = true;
  }
  std::shared_ptr<Table::Plan>& known = table.plans[messages];
  if (known) return known->plan;
  const auto made = std::make_shared<Table::Plan>(cuda_);
  const auto count = static_cast<int64_t>(table.entries.size());
  TF_RETURN_IF_ERROR(
      Check(messages < 0
                ? cuda_->plan_encode(table.entries.data(), count, ordinal_, &made->plan)
                : cuda_->plan_decode(table.entries.data(), count, messages, ordinal_, &made->plan),
            "planning"));
  TF_RETURN_IF_ERROR(Allocate(cuda_->plan_bytes(made->plan) + kAlignment, &made->memory));
  const hvdc_cuda_queue queue = Queue();
  const auto begin = reinterpret_cast<uintptr_t>(made->memory.data());
  void* const own = reinterpret_cast<void*>((begin + kAlignment - 1) / kAlignment * kAlignment);
  TF_RETURN_IF_ERROR(Check(cuda_->plan_prepare(made->plan, own, &queue), "preparing a plan"));
  known = made;
  return made->plan;
}

absl::Status GpuKernels::Launch(const Table& table, const Arrays& arrays, void* message) {
  const auto plan = PlanOf(table, -1);
  if (!plan.ok()) return plan.status();
  const hvdc_cuda_queue queue = Queue();
  return Check(cuda_->encode_batch(*plan, arrays.data(), static_cast<int64_t>(arrays.size()),
                                   message, &queue),
               "encoding");
}

absl::Status GpuKernels::Sum(const Messages& messages, const Arrays& arrays, float scale,
                             bool flagged) {
  const auto plan = PlanOf(*messages.table, messages.count);
  if (!plan.ok()) return plan.status();
  calls_.emplace(++call_, messages);
  if (calls_.size() > kRemembered) calls_.erase(calls_.begin());
  const hvdc_cuda_queue queue = Queue();
  return Check(
      cuda_->decode_batch(*plan, arrays.data(), static_cast<int64_t>(arrays.size()), messages.first,
                          messages.stride, scale, flagged ? flags() : nullptr, error_,
                          call_ << kEntryBits, &queue),
      "decoding");
}

hvdc_cuda_queue GpuKernels::Queue() const {
  return {ordinal_, 0, stream_->platform_specific_handle().stream};
}

absl::Status GpuKernels::Allocate(int64_t bytes, Tensor* memory) const {
  *memory = Tensor(allocator_, DT_UINT8, TensorShape({bytes}));
  if (memory->IsInitialized()) return absl::OkStatus();
  return errors::ResourceExhausted("expected ", bytes, " bytes of a GPU's memory, got none");
}

absl::Status GpuKernels::Check(int status, const char* call) const {
  switch (status) {
    case HVDC_OK:
      return absl::OkStatus();
    case HVDC_CUDA_FAILED:
      return errors::Internal(call, ": CUDA answered: ", cuda_->message());
    case HVDC_CUDA_TOO_LARGE:
      return errors::InvalidArgument(call, ": expected fewer than 2^31 elements and at most ",
                                     static_cast<int>(HVDC_CUDA_MAX_PAYLOADS),
                                     " payloads on a GPU, got more");
    default:
      return errors::Internal(call, " failed with status ", status);
  }
}

}  // namespace hvd_compress

extern "C" void hvdc_tensorflow_set_cuda(const hvd_compress::CudaFunctions* functions) {
  hvd_compress::functions = functions;
}
