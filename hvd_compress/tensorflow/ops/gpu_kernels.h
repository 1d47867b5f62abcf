// A GPU's kernels, in TensorFlow's stream of the device.
#ifndef HVD_COMPRESS_TENSORFLOW_OPS_GPU_KERNELS_H_
#define HVD_COMPRESS_TENSORFLOW_OPS_GPU_KERNELS_H_

#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "kernels.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/platform/mutex.h"
#include "xla/stream_executor/stream.h"

namespace hvd_compress {

// The functions of hvdc_cuda.h, in the order of hvd_compress/tensorflow/native.py, which opens the
// library. So nothing here needs CUDA to be compiled or loaded.
struct CudaFunctions {
  decltype(&hvdc_cuda_message) message;
  decltype(&hvdc_cuda_restore) restore;
  decltype(&hvdc_cuda_plan_encode) plan_encode;
  decltype(&hvdc_cuda_plan_decode) plan_decode;
  decltype(&hvdc_cuda_plan_bytes) plan_bytes;
  decltype(&hvdc_cuda_plan_prepare) plan_prepare;
  decltype(&hvdc_cuda_plan_free) plan_free;
  decltype(&hvdc_cuda_encode_batch) encode_batch;
  decltype(&hvdc_cuda_decode_batch) decode_batch;
};

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
  absl::Status Encode(const BucketLayout& layout, const Table& table, const Arrays& arrays,
                      void* message) override;
  absl::Status DecodeSum(const Messages& messages, const Arrays& arrays, float scale,
                         bool* nonfinite) override;
  absl::Status FlagNonfinite(const void* halves, int64_t count, bool* nonfinite) override;
  absl::Status RestoreIfFlagged(const void* before, void* after, int dtype, int64_t count) override;
  absl::Status Scale(const void* numbers, int from, int64_t count, float scale, void* out,
                     int to) override;

 private:
  GpuKernels() = default;

  // The caller holds the lock, because the launches of a call share the memory of the plan.
  //
  // The plan for a table's encoding, or for the decoding of some messages; -1 is encoding.
  absl::StatusOr<const hvdc_cuda_plan*> PlanOf(const Table& table, int messages);
  absl::Status Launch(const Table& table, const Arrays& arrays, void* message);
  absl::Status Sum(const Messages& messages, const Arrays& arrays, float scale, bool flagged);

  hvdc_cuda_queue Queue() const;
  absl::Status Allocate(int64_t bytes, tensorflow::Tensor* memory) const;
  absl::Status Check(int status, const char* call) const;
  // out = scale * numbers, through a payload of a codec that casts.
  absl::Status Pass(uint32_t codec, const char* what, const void* numbers, int from, int64_t count,
                    float scale, void* out, int to, bool flagged);
  uint32_t* flags() { return static_cast<uint32_t*>(flags_.data()); }

  const CudaFunctions* cuda_;
  stream_executor::Stream* stream_;
  tensorflow::Allocator* allocator_;
  int ordinal_;  // CUDA's

  tensorflow::mutex mutex_;
  tensorflow::Tensor flags_;  // a word on the device
  hvdc_cuda_error* error_;    // in host memory that the device writes
  bool flags_are_of_this_step_ = false;
  std::map<std::pair<uint32_t, int64_t>, std::shared_ptr<BucketLayout>> passes_;
  std::map<uint64_t, Messages> calls_;  // that an error can be traced to, by number
  uint64_t call_ = 0;
};

}  // namespace hvd_compress

// Gives the operations the library's functions, by ctypes, before one of them runs on a GPU. They
// have to live as long as the process.
extern "C" HVDC_API void hvdc_tensorflow_set_cuda(const hvd_compress::CudaFunctions* functions);

#endif  // HVD_COMPRESS_TENSORFLOW_OPS_GPU_KERNELS_H_
