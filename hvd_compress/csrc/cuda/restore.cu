// Residuals of a step that is dropped without the host's knowing.
#define HVDC_ARCH device

#include "cuda/grid.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"

namespace hvdc {
namespace HVDC_ARCH {
namespace {

constexpr int64_t kResiduals = 200;  // that the parameter of a kernel holds
constexpr int64_t kBlocks = 512;     // of threads: steps are rarely dropped, and then may take long

struct Residuals {
  const uint32_t* when;
  uint32_t size;
  uint32_t counts[kResiduals];
  const float* before[kResiduals];
  float* after[kResiduals];
};
static_assert(sizeof(Residuals) <= 4096, "kernel parameters");

__global__ void __launch_bounds__(kThreads) CopyIf(const __grid_constant__ Residuals all) {
  if (!*all.when) return;
  const Place place = {blockIdx.x, gridDim.x};
  for (uint32_t i = 0; i < all.size; ++i) {
    const float* const from = all.before[i];
    float* const to = all.after[i];
    const uint32_t count = all.counts[i];
    for (uint32_t at = place.Thread(); at < count; at += place.Threads()) to[at] = from[at];
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
