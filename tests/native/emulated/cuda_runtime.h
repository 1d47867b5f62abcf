// As much of CUDA as csrc/cuda uses, on the host: kernels run block after block, and the threads of
// a block take turns. A thread gives way where CUDA has it meet others, and nowhere else; so that
// what they tell each other without meeting depends on the order of the turns, which tests choose.
//
// Numbers are rounded as on a device, one operation at a time. Nothing here says how a device
// schedules, caches or reorders.
#ifndef HVDC_TESTS_EMULATED_CUDA_RUNTIME_H_
#define HVDC_TESTS_EMULATED_CUDA_RUNTIME_H_

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <tuple>
#include <utility>

#define __device__
#define __global__
#define __host__
#define __shared__ static
#define __launch_bounds__(...)
#define __grid_constant__

struct dim3 {
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
  unsigned x, y, z;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace emulated {

// Runs body in every thread of a grid.
using Body = void (*)(void* context);
void RunGrid(dim3 grid, dim3 block, size_t shared, Body body, void* context);

uint8_t* DynamicShared();
// Waits for the other threads of the warp, or of the block, and comes back with what all of a warp
// brought. All of them must be at the same kind of meeting.
enum class Meeting { kNone, kShuffle, kVote, kWarp, kBlock };
const uint64_t* MeetWarp(Meeting meeting, unsigned mask, uint64_t value);
void MeetBlock();

template <class T>
uint64_t ToBits(T value) {
  static_assert(sizeof(T) <= 8, "");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(value));
  return bits;
}

template <class T>
T FromBits(uint64_t bits) {
  T value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

}  // namespace emulated

extern dim3 threadIdx, blockIdx, blockDim, gridDim;

// Meetings.

inline void __syncthreads() { emulated::MeetBlock(); }
inline void __syncwarp(unsigned mask = 0xFFFFFFFFu) {
  emulated::MeetWarp(emulated::Meeting::kWarp, mask, 0);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bit, int width) {
  const uint64_t* all =
      emulated::MeetWarp(emulated::Meeting::kShuffle, mask, emulated::ToBits(value));
  const int lane = static_cast<int>(threadIdx.x % 32), other = lane ^ bit;
  // A lane outside of the segment gives what is its own.
  return other / width == lane / width ? emulated::FromBits<T>(all[other]) : value;
}
inline int __any_sync(unsigned mask, int value) {
  const uint64_t* all = emulated::MeetWarp(emulated::Meeting::kVote, mask, value != 0);
  int any = 0;
  for (int lane = 0; lane < 32; ++lane) any |= (mask >> lane & 1) && all[lane];
  return any;
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned distance, int) {
  const uint64_t* all =
      emulated::MeetWarp(emulated::Meeting::kShuffle, mask, emulated::ToBits(value));
  const unsigned lane = threadIdx.x % 32;
  return lane < distance ? value : emulated::FromBits<T>(all[lane - distance]);
}
inline unsigned __ballot_sync(unsigned mask, int value) {
  const uint64_t* all = emulated::MeetWarp(emulated::Meeting::kVote, mask, value != 0);
  unsigned ballot = 0;
  for (int lane = 0; lane < 32; ++lane) ballot |= (mask >> lane & 1 && all[lane] ? 1u : 0u) << lane;
  return ballot;
}
inline void __threadfence() {}
inline void __threadfence_system() {}

// Atomic operations: threads take turns.

template <class T>
T atomicAdd(T* at, T value) {
  const T before = *at;
  *at = before + value;
  return before;
}
template <class T>
T atomicOr(T* at, T value) {
  const T before = *at;
  *at = before | value;
  return before;
}
template <class T>
T atomicMin(T* at, T value) {
  const T before = *at;
  if (value < before) *at = value;
  return before;
}
template <class T>
T atomicMax(T* at, T value) {
  const T before = *at;
  if (before < value) *at = value;
  return before;
}
template <class T>
T atomicExch(T* at, T value) {
  const T before = *at;
  *at = value;
  return before;
}

// Arithmetic.

inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = uint64_t{y} << 32 | x;
  unsigned permuted = 0;
  for (int i = 0; i < 4; ++i) {
    permuted |= static_cast<unsigned>(bytes >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
  }
  return permuted;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) << (shift & 31) >> 32);
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
inline int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }
inline int __float2int_rn(float x) { return static_cast<int>(lrintf(x)); }
inline int __float2int_rz(float x) { return static_cast<int>(x); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }

// The runtime.

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidConfiguration = 9 };
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };
using cudaStream_t = struct CUstream_st*;
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};

inline const char* cudaGetErrorString(cudaError_t) { return "emulated CUDA refuses the launch"; }
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream);
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream);

template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, size_t) {
  *blocks = 16;
  return cudaSuccess;
}

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const Arguments&... arguments) {
  // As devices do: 48 KB at most, static shared memory included.
  static_assert((sizeof(Parameters) + ...) <= 4096, "parameters of a kernel");
  if (config->blockDim.x > 1024 || config->blockDim.x % 32 || !config->gridDim.x ||
      config->dynamicSmemBytes > 48 * 1024 - 64) {
    return cudaErrorInvalidConfiguration;
  }
  struct Call {
    void (*kernel)(Parameters...);
    std::tuple<Parameters...> parameters;
  } call = {kernel, std::tuple<Parameters...>(arguments...)};
  emulated::RunGrid(
      config->gridDim, config->blockDim, config->dynamicSmemBytes,
      [](void* context) {
        const Call* const made = static_cast<Call*>(context);
        std::apply(made->kernel, made->parameters);
      },
      &call);
  return cudaSuccess;
}

#endif  // HVDC_TESTS_EMULATED_CUDA_RUNTIME_H_
