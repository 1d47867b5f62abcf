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

// As many blocks as there is work for, but no more than fill the device: they take what is left
// over.
inline uint32_t GridFor(int64_t blocks) {
  constexpr int kPerProcessor = 16;
  int device = 0, processors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  const int64_t most = static_cast<int64_t>(processors < 1 ? 1 : processors) * kPerProcessor;
  if (blocks > most) blocks = most;
  return static_cast<uint32_t>(blocks < 1 ? 1 : blocks);
}

// Blocks whose threads have one quad each.
inline int64_t BlocksForQuads(int64_t count) { return (count + 4 * kThreads - 1) / (4 * kThreads); }

template <class... Parameters, class... Arguments>
int Launch(void (*kernel)(Parameters...), uint32_t blocks, uint32_t threads, size_t shared,
           cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
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
