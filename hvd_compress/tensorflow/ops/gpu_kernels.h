// A GPU's kernels, in TensorFlow's stream of the device.
#ifndef HVD_COMPRESS_TENSORFLOW_OPS_GPU_KERNELS_H_
#define HVD_COMPRESS_TENSORFLOW_OPS_GPU_KERNELS_H_

#include <map>
#include <memory>
#include <string>

#include "cuda_library.h"
#include "kernels.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/platform/mutex.h"
#include "xla/stream_executor/stream.h"

namespace hvd_compress {

// Calls return when their work is in the stream. So an altered payload is no error of DecodeSum:
// the result is NaN, and TakeError tells when the device has got there. The flags of a step's
// payloads are collected in a word of the device, which decides there what is undone.
//
// TensorFlow runs operations of one device in several threads, but puts all of their work into one
// stream, and its allocator relies on it: memory may be released before the work that uses it is
// done, since whoever gets it next puts work into the same stream.
class GpuKernels : public Kernels {
 public:
  // The kernels for an operation on a GPU.
  static absl::StatusOr<std::shared_ptr<GpuKernels>> For(tensorflow::OpKernelContext* context);

  // Whether an operation is on the same device.
  bool Serve(tensorflow::OpKernelContext* context) const;

  // Forgets the flags of the step before.
  void BeginStep();

  // A description of the altered payloads of earlier steps, if any; each is told once.
  std::string TakeError();

  absl::Status Zero(void* memory, int64_t bytes) override;
  absl::Status Encode(const hvdc_spec& spec, const hvdc_noise& noise, const void* numbers,
                      int dtype, const Feedback* feedback, void* payload, int64_t bytes) override;
  absl::Status DecodeSum(const Payloads& payloads, const Senders& senders, float scale, void* out,
                         int dtype, bool* nonfinite) override;
  absl::Status FlagNonfinite(const void* halves, int64_t count, bool* nonfinite) override;
  absl::Status RestoreIfFlagged(const void* before, void* after, int dtype, int64_t count) override;
  absl::Status Scale(const void* numbers, int from, int64_t count, float scale, void* out,
                     int to) override;

 private:
  GpuKernels() = default;

  // The lock is held by whoever calls these: a call of the library may be several launches, which
  // share the workspace.
  absl::Status Prepare(const hvdc_spec& spec, hvdc_cuda_queue* queue);
  hvdc_cuda_queue Queue() const;  // without a workspace
  absl::Status Allocate(int64_t bytes, tensorflow::Tensor* memory) const;
  absl::Status Sum(const Payloads& payloads, const Senders& senders, float scale, void* out,
                   int dtype, bool flagged);
  absl::Status Check(int status, const char* call) const;
  // out = scale * numbers, through a payload of a codec that casts.
  absl::Status Pass(uint32_t codec, const char* what, const void* numbers, int from, int64_t count,
                    float scale, void* out, int to, bool flagged);
  uint64_t Remember(const Senders& senders);
  uint32_t* flags() { return static_cast<uint32_t*>(flags_.data()); }

  const CudaLibrary* library_;
  stream_executor::Stream* stream_;
  tensorflow::Allocator* allocator_;
  int ordinal_;  // CUDA's

  tensorflow::mutex mutex_;
  tensorflow::Tensor workspace_;  // aligned to 256 bytes by whoever uses it
  tensorflow::Tensor flags_;      // a word on the device
  hvdc_cuda_error* error_;        // in host memory that the device writes
  bool flags_are_of_this_step_ = false;
  std::map<uint64_t, Senders> calls_;  // that an error can be traced to, by tag
  uint64_t tag_ = 0;
};

}  // namespace hvd_compress

#endif  // HVD_COMPRESS_TENSORFLOW_OPS_GPU_KERNELS_H_
