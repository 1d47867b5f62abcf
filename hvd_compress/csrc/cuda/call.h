// The parts that all calls of the C interface share.
#ifndef HVDC_CUDA_CALL_H_
#define HVDC_CUDA_CALL_H_

#include <cuda_runtime.h>
#include <stdlib.h>

#include "cuda/kernels.h"

namespace hvdc {
namespace HVDC_ARCH {

// Makes a device current for a call.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) : status_(Check(cudaGetDevice(&before_))) {
    if (status_ != HVDC_OK || before_ == device) return;
    status_ = Check(cudaSetDevice(device));
    changed_ = status_ == HVDC_OK;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  int status() const { return status_; }

 private:
  int before_ = 0;
  int status_;
  bool changed_ = false;
};

inline bool Aligned(const void* pointer, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(bytes) == 0;
}

inline bool ValidResidualDtype(int dtype) {
  return dtype == HVDC_DTYPE_FLOAT32 || dtype == HVDC_DTYPE_BFLOAT16;
}

inline cudaStream_t StreamOf(const hvdc_cuda_queue& queue) {
  return static_cast<cudaStream_t>(queue.stream);
}

// With HVDC_CUDA_SYNC=1, every call waits for its work, so that it reports its own errors.
inline int Settle(int status, const hvdc_cuda_queue& queue) {
  static const bool wait = [] {
    const char* value = getenv("HVDC_CUDA_SYNC");
    return value && *value && *value != '0';
  }();
  if (status != HVDC_OK || !wait) return status;
  return Check(cudaStreamSynchronize(StreamOf(queue)));
}

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CUDA_CALL_H_
