#include "cuda_library.h"

#include <dlfcn.h>

#include <string>

#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/platform/mutex.h"

namespace hvd_compress {
namespace {

tensorflow::mutex opening;
const CudaLibrary* opened = nullptr;  // for ever: streams may have its kernels

template <typename Function>
bool Find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

// Opens the library; returns an error, or an empty string.
std::string Open(const char* path) {
  void* const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return dlerror();
  decltype(&hvdc_cuda_abi_version) version;
  if (!Find(library, "hvdc_cuda_abi_version", &version) || version() != HVDC_CUDA_ABI_VERSION) {
    return std::string(path) + ": expected the CUDA library of this version of the package";
  }
  CudaLibrary found;
  const bool complete = Find(library, "hvdc_cuda_message", &found.message) &&
                        Find(library, "hvdc_cuda_workspace_bytes", &found.workspace_bytes) &&
                        Find(library, "hvdc_cuda_prepare", &found.prepare) &&
                        Find(library, "hvdc_cuda_encode", &found.encode) &&
                        Find(library, "hvdc_cuda_decode_sum", &found.decode_sum) &&
                        Find(library, "hvdc_cuda_restore", &found.restore);
  if (!complete) return dlerror();
  opened = new CudaLibrary(found);
  return "";
}

}  // namespace

absl::StatusOr<const CudaLibrary*> OpenedCudaLibrary() {
  tensorflow::mutex_lock lock(opening);
  if (opened != nullptr) return opened;
  return tensorflow::errors::FailedPrecondition(
      "expected an opened libhvdc_cuda.so for gradients on a GPU, got none: make the compressor "
      "with "
      "device=\"GPU:0\"");
}

}  // namespace hvd_compress

extern "C" const char* hvdc_tensorflow_open_cuda(const char* path) {
  static std::string wrong;
  tensorflow::mutex_lock lock(hvd_compress::opening);
  if (hvd_compress::opened == nullptr) wrong = hvd_compress::Open(path);
  return wrong.empty() ? nullptr : wrong.c_str();
}
