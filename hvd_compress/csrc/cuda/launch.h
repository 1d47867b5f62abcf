// Kernel launches: how many blocks, and which coder.
#ifndef HVDC_CUDA_LAUNCH_H_
#define HVDC_CUDA_LAUNCH_H_

#include "codec/cast.h"
#include "codec/ecq.h"
#include "codec/int8.h"
#include "codec/onebit.h"
#include "codec/ternary.h"
#include "cuda/kernels.h"
#include "simd/thread.h"

namespace hvdc {
namespace HVDC_ARCH {

// Blocks whose threads have one quad each.
inline int64_t BlocksForQuads(int64_t count) { return (count + 4 * kThreads - 1) / (4 * kThreads); }

// As many blocks of kThreads as there is work for, at least one, but no more than the device runs
// at a time: they take what is left over, and all end together.
template <class... Parameters, class... Arguments>
int Launch(void (*kernel)(Parameters...), int64_t blocks, size_t shared, cudaStream_t stream,
           const Arguments&... arguments) {
  int device = 0, processors = 0, resident = 0;
  int status = Check(cudaGetDevice(&device));
  if (status == HVDC_OK) {
    status = Check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  }
  if (status == HVDC_OK) {
    status =
        Check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, kThreads, shared));
  }
  if (status != HVDC_OK) return status;
  const int64_t most = static_cast<int64_t>(processors) * resident;
  if (blocks > most) blocks = most;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks < 1 ? 1 : blocks));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  return Check(cudaLaunchKernelEx(&config, kernel, arguments...));
}

template <class C>
struct CoderType {
  using Type = C;
};

// Calls work with the CoderType of a valid spec.
template <class Work>
int WithCoder(const hvdc_spec& spec, const Work& work) {
  switch (spec.codec) {
    case HVDC_ONEBIT:
      if (spec.grouping >= HVDC_ROW) return work(CoderType<OneBitMatrixCoder<Thread>>());
      return work(CoderType<OneBitCoder<Thread>>());
    case HVDC_INT8:
      if (spec.variant == HVDC_LINEAR) return work(CoderType<LinearCoder<Thread>>());
      return work(CoderType<TableCoder<Thread>>());
    case HVDC_TERNARY:
      return work(CoderType<TernaryCoder<Thread>>());
    case HVDC_ECQ:
      return work(CoderType<EcqCoder<Thread>>());
    case HVDC_FP16:
      return work(CoderType<HalfCoder<Thread>>());
    case HVDC_BF16:
      return work(CoderType<BfloatCoder<Thread>>());
    default:
      return work(CoderType<FloatCoder<Thread>>());
  }
}

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CUDA_LAUNCH_H_
