// Residuals of a step that is dropped without the host's knowing.
#define HVDC_ARCH device

#include "cuda/grid.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"

namespace hvdc {
namespace HVDC_ARCH {
namespace {

constexpr int64_t kResiduals = 190;  // that the parameter of a kernel holds
constexpr int64_t kBlocks = 512;     // of threads: steps are rarely dropped, and then may take long

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

}  // namespace

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
    status = Launch(CopyIf, blocks < kBlocks ? blocks : kBlocks, 0, stream, all);
  }
  return status;
}

}  // namespace HVDC_ARCH
}  // namespace hvdc
