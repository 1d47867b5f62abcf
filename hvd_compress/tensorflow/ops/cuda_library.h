// libhvdc_cuda.so, which is opened where gradients are on a GPU, and missing where the package was
// built without nvcc. So nothing here needs CUDA to be compiled or loaded.
#ifndef HVD_COMPRESS_TENSORFLOW_OPS_CUDA_LIBRARY_H_
#define HVD_COMPRESS_TENSORFLOW_OPS_CUDA_LIBRARY_H_

#include "absl/status/statusor.h"
#include "hvdc_cuda.h"

namespace hvd_compress {

// Functions of hvdc_cuda.h.
struct CudaLibrary {
  decltype(&hvdc_cuda_message) message;
  decltype(&hvdc_cuda_workspace_bytes) workspace_bytes;
  decltype(&hvdc_cuda_prepare) prepare;
  decltype(&hvdc_cuda_encode) encode;
  decltype(&hvdc_cuda_decode_sum) decode_sum;
  decltype(&hvdc_cuda_restore) restore;
};

// The library that hvdc_tensorflow_open_cuda has opened; an error where it has not.
absl::StatusOr<const CudaLibrary*> OpenedCudaLibrary();

}  // namespace hvd_compress

// Opens the library, once. Returns null, or what is wrong with it;
// hvd_compress/tensorflow/native.py calls it.
extern "C" HVDC_API const char* hvdc_tensorflow_open_cuda(const char* path);

#endif  // HVD_COMPRESS_TENSORFLOW_OPS_CUDA_LIBRARY_H_
