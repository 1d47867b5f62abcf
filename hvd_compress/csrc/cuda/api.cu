// The C interface but for plans: what is wrong, and residuals of a step that is dropped.
#define HVDC_ARCH device

#include <algorithm>

#include "cuda/call.h"
#include "cuda/launch.h"

namespace hvdc {
namespace HVDC_ARCH {
namespace {

thread_local const char* message = "no error";

constexpr int64_t kResiduals = 190;  // that the parameter of a kernel holds
constexpr int64_t kBlocks = 512;     // of threads: steps are rarely dropped, and then may take long

// Residuals of a step that is dropped without the host's knowing.
struct Residuals {
  const uint32_t* when;
  uint32_t size;
  uint32_t counts[kResiduals];
  const void* before[kResiduals];
  void* after[kResiduals];
  uint8_t dtypes[kResiduals];
};
static_assert(sizeof(Residuals) <= 4096, "kernel parameters");

template <class T>
__device__ inline void CopyAs(const void* before, void* after, uint32_t count) {
  const Place place = {blockIdx.x, gridDim.x};
  const T* const from = static_cast<const T*>(before);
  T* const to = static_cast<T*>(after);
  for (uint32_t at = place.Thread(); at < count; at += place.Threads()) to[at] = from[at];
}

__global__ void __launch_bounds__(kThreads) CopyIf(const __grid_constant__ Residuals all) {
  if (!*all.when) return;
  for (uint32_t i = 0; i < all.size; ++i) {
    if (all.dtypes[i] == HVDC_DTYPE_FLOAT32) {
      CopyAs<uint32_t>(all.before[i], all.after[i], all.counts[i]);
    } else {
      CopyAs<uint16_t>(all.before[i], all.after[i], all.counts[i]);
    }
  }
}

// Copies where *when is not 0, in as few launches as can hold all residuals.
int Restore(const hvdc_cuda_residual* residuals, int64_t count, const uint32_t* when,
            cudaStream_t stream) {
  int status = HVDC_OK;
  for (int64_t first = 0; first < count && status == HVDC_OK; first += kResiduals) {
    Residuals all = {};
    all.when = when;
    int64_t longest = 0;
    for (int64_t i = first; i < count && i < first + kResiduals; ++i) {
      if (longest < residuals[i].count) longest = residuals[i].count;
      all.counts[all.size] = static_cast<uint32_t>(residuals[i].count);
      all.dtypes[all.size] = static_cast<uint8_t>(residuals[i].dtype);
      all.before[all.size] = residuals[i].before;
      all.after[all.size++] = residuals[i].after;
    }
    const int64_t blocks = (longest + kThreads - 1) / kThreads;
    status = Launch(CopyIf, std::clamp(blocks, int64_t{1}, kBlocks), 0, stream, all);
  }
  return status;
}

}  // namespace

int Check(cudaError_t error) {
  if (error == cudaSuccess) return HVDC_OK;
  message = cudaGetErrorString(error);
  return HVDC_CUDA_FAILED;
}

}  // namespace HVDC_ARCH
}  // namespace hvdc

using namespace hvdc;
using namespace hvdc::device;

extern "C" uint32_t hvdc_cuda_abi_version(void) { return HVDC_CUDA_ABI_VERSION; }

extern "C" const char* hvdc_cuda_message(void) { return message; }

extern "C" int hvdc_cuda_restore(const hvdc_cuda_residual* residuals, int64_t count,
                                 const uint32_t* when, const hvdc_cuda_queue* queue) {
  if (!queue || !when || count < 0 || (count && !residuals)) return HVDC_BAD_SPEC;
  for (int64_t i = 0; i < count; ++i) {
    const hvdc_cuda_residual& one = residuals[i];
    if (one.count < 0 || (one.count && (!one.before || !one.after))) return HVDC_BAD_SPEC;
    if (!ValidResidualDtype(one.dtype)) return HVDC_BAD_SPEC;
    if (one.count > INT32_MAX) return HVDC_CUDA_TOO_LARGE;
    const int64_t bytes = ElementBytes(one.dtype);
    if (!Aligned(one.before, bytes) || !Aligned(one.after, bytes)) return HVDC_CUDA_MISALIGNED;
  }
  const DeviceGuard guard(queue->device);
  if (guard.status() != HVDC_OK) return guard.status();
  return Settle(Restore(residuals, count, when, StreamOf(*queue)), *queue);
}
