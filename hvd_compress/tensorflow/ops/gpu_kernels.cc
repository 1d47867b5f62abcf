#include "gpu_kernels.h"

#include "tensorflow/core/platform/errors.h"

namespace hvd_compress {

using namespace tensorflow;  // NOLINT: the macros need it

namespace {

constexpr int64_t kAlignment = 256;
constexpr size_t kRemembered = 4096;  // calls

using Memory = stream_executor::DeviceMemoryBase;

int64_t RoundUp(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

uint8_t* Aligned(const Tensor& memory) {
  return reinterpret_cast<uint8_t*>(RoundUp(reinterpret_cast<int64_t>(memory.data())));
}

}  // namespace

absl::StatusOr<std::shared_ptr<GpuKernels>> GpuKernels::For(OpKernelContext* context) {
  const auto library = OpenedCudaLibrary();
  if (!library.ok()) return library.status();
  const DeviceContext* const device = context->op_device_context();
  const auto* const info = context->device()->tensorflow_accelerator_device_info();
  if (device == nullptr || device->stream() == nullptr || info == nullptr || info->gpu_id < 0) {
    return errors::FailedPrecondition("expected a GPU with a stream, got ",
                                      context->device()->name());
  }
  std::shared_ptr<GpuKernels> kernels(new GpuKernels);
  kernels->library_ = *library;
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
  const auto call = calls_.find(tag);
  const Senders unknown{"a gradient", 0, false, 0};
  const absl::Status told =
      BadPayload(call == calls_.end() ? unknown : call->second, status, met->payload);
  met->status = HVDC_OK;
  return absl::StrCat(told.message(), "; its result was NaN");
}

absl::Status GpuKernels::Zero(void* memory, int64_t bytes) {
  if (bytes == 0) return absl::OkStatus();
  Memory device(memory, bytes);
  return stream_->MemZero(&device, bytes);
}

absl::Status GpuKernels::Encode(const hvdc_spec& spec, const hvdc_noise& noise, const void* numbers,
                                int dtype, const Feedback* feedback, void* payload, int64_t bytes) {
  hvdc_feedback in_place = {};
  if (feedback) {
    in_place = {feedback->alpha, feedback->beta, feedback->next, feedback->residual_dtype, 0};
    const int64_t width = feedback->residual_dtype == HVDC_DTYPE_FLOAT32 ? 4 : 2;
    const int64_t size = spec.rows * spec.columns * width;
    if (size) {
      Memory next(feedback->next, size);
      const Memory before(const_cast<void*>(feedback->residual), size);
      TF_RETURN_IF_ERROR(stream_->Memcpy(&next, before, size));
    }
  }
  mutex_lock lock(mutex_);
  hvdc_cuda_queue queue;
  TF_RETURN_IF_ERROR(Prepare(spec, &queue));
  return Check(library_->encode(&spec, &noise, numbers, dtype, feedback ? &in_place : nullptr,
                                payload, bytes, &queue),
               "encoding");
}

absl::Status GpuKernels::DecodeSum(const Payloads& payloads, const Senders& senders, float scale,
                                   void* out, int dtype, bool*) {
  mutex_lock lock(mutex_);
  return Sum(payloads, senders, scale, out, dtype, true);
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
  return Check(library_->restore(&one, 1, flags(), &queue), "restoring a residual");
}

absl::Status GpuKernels::Scale(const void* numbers, int from, int64_t count, float scale, void* out,
                               int to) {
  // The codec keeps all bits: such steps are rare.
  return Pass(HVDC_FP32, "an uncompressed sum", numbers, from, count, scale, out, to, false);
}

absl::Status GpuKernels::Pass(uint32_t codec, const char* what, const void* numbers, int from,
                              int64_t count, float scale, void* out, int to, bool flagged) {
  hvdc_spec spec = {};
  spec.codec = codec;
  spec.rows = count;
  spec.columns = 1;
  const int64_t bytes = hvdc_payload_bytes(&spec);
  Tensor payload;
  TF_RETURN_IF_ERROR(Allocate(bytes, &payload));
  TF_RETURN_IF_ERROR(Encode(spec, {}, numbers, from, nullptr, payload.data(), bytes));
  mutex_lock lock(mutex_);
  const auto* const first = static_cast<const uint8_t*>(payload.data());
  return Sum({spec, 0, first, bytes, bytes, 1}, {what, 0, false, 0}, scale, out, to, flagged);
}

absl::Status GpuKernels::Prepare(const hvdc_spec& spec, hvdc_cuda_queue* queue) {
  // Plain codes take as much for any number of payloads.
  const int64_t needed = library_->workspace_bytes(&spec);
  *queue = Queue();
  int64_t size = workspace_.NumElements() - kAlignment;
  if (size < needed) {
    for (size = kAlignment; size < needed;) size *= 2;
    TF_RETURN_IF_ERROR(Allocate(size + kAlignment, &workspace_));
    queue->workspace = Aligned(workspace_);
    queue->workspace_bytes = size;
    TF_RETURN_IF_ERROR(Check(library_->prepare(queue), "preparing a workspace"));
  }
  queue->workspace = Aligned(workspace_);
  queue->workspace_bytes = size;
  if (!flags_are_of_this_step_) {
    TF_RETURN_IF_ERROR(Zero(flags(), sizeof(uint32_t)));
    flags_are_of_this_step_ = true;
  }
  return absl::OkStatus();
}

hvdc_cuda_queue GpuKernels::Queue() const {
  return {ordinal_, 0, stream_->platform_specific_handle().stream, nullptr, 0};
}

absl::Status GpuKernels::Allocate(int64_t bytes, Tensor* memory) const {
  *memory = Tensor(allocator_, DT_UINT8, TensorShape({bytes}));
  if (memory->IsInitialized()) return absl::OkStatus();
  return errors::ResourceExhausted("expected ", bytes, " bytes of a GPU's memory, got none");
}

absl::Status GpuKernels::Sum(const Payloads& payloads, const Senders& senders, float scale,
                             void* out, int dtype, bool flagged) {
  hvdc_cuda_queue queue;
  TF_RETURN_IF_ERROR(Prepare(payloads.spec, &queue));
  return Check(library_->decode_sum(&payloads.spec, payloads.step, payloads.first, payloads.bytes,
                                    payloads.stride, payloads.count, scale, out, dtype,
                                    flagged ? flags() : nullptr, error_, Remember(senders), &queue),
               "decoding");
}

absl::Status GpuKernels::Check(int status, const char* call) const {
  switch (status) {
    case HVDC_OK:
      return absl::OkStatus();
    case HVDC_CUDA_FAILED:
      return errors::Internal(call, ": CUDA answered: ", library_->message());
    case HVDC_CUDA_TOO_LARGE:
      return errors::InvalidArgument(call, ": expected fewer than 2^31 elements and at most ",
                                     static_cast<int>(HVDC_CUDA_MAX_PAYLOADS),
                                     " payloads on a GPU, got more");
    default:
      return errors::Internal(call, " failed with status ", status);
  }
}

uint64_t GpuKernels::Remember(const Senders& senders) {
  calls_[++tag_] = senders;
  if (calls_.size() > kRemembered) calls_.erase(calls_.begin());
  return tag_;
}

}  // namespace hvd_compress
