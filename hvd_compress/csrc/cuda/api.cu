// The C interface: arguments are checked, jobs made, the device chosen.
#define HVDC_ARCH device

#include "codec/layout.h"
#include "codec/philox.h"
#include "codec/tables.h"
#include "cuda/batch.h"
#include "cuda/call.h"
#include "cuda/launch.h"

namespace hvdc {
namespace HVDC_ARCH {
namespace {

thread_local const char* message = "no error";

// Checks what every call has, and finds the layout and the workspace.
template <class Job>
int Open(const hvdc_spec* spec, int dtype, const hvdc_cuda_queue* queue, Job* job, Passes* passes) {
  if (!queue || !spec || !ValidDtype(dtype)) return HVDC_BAD_SPEC;
  const int status = Describe(*spec, job, passes);
  if (status != HVDC_OK) return status;
  job->dtype = dtype;
  if (!Aligned(queue->workspace, 256)) return HVDC_CUDA_MISALIGNED;
  int64_t needed;
  job->workspace = MakeWorkspace(*spec, *passes, static_cast<uint8_t*>(queue->workspace), &needed);
  if (!queue->workspace || queue->workspace_bytes < needed) return HVDC_CUDA_WORKSPACE;
  return HVDC_OK;
}

__global__ void FillTables(Int8Tables* tables) {
  // One thread each: this is done once.
  if (threadIdx.x % kWarpSize) return;
  for (uint32_t table = threadIdx.x / kWarpSize; table < kTables; table += kWarps) {
    BuildInt8Tables(HVDC_DYNAMIC + table, tables + table);
  }
}

// Residuals of a step that is dropped without the host's knowing.
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
    status = Launch(CopyIf, blocks < kBlocks ? blocks : kBlocks, 0, stream, all);
  }
  return status;
}

}  // namespace

int Check(cudaError_t error) {
  if (error == cudaSuccess) return HVDC_OK;
  message = cudaGetErrorString(error);
  return HVDC_CUDA_FAILED;
}

int Prepare(void* zeros, int64_t bytes, Int8Tables* tables, cudaStream_t stream) {
  const int status = Check(cudaMemsetAsync(zeros, 0, static_cast<size_t>(bytes), stream));
  if (status != HVDC_OK) return status;
  return Launch(FillTables, 1, 0, stream, tables);
}

}  // namespace HVDC_ARCH
}  // namespace hvdc

using namespace hvdc;
using namespace hvdc::device;

extern "C" uint32_t hvdc_cuda_abi_version(void) { return HVDC_CUDA_ABI_VERSION; }

extern "C" const char* hvdc_cuda_message(void) { return message; }

extern "C" int64_t hvdc_cuda_workspace_bytes(const hvdc_spec* spec) {
  if (!spec || !HasKernel(*spec)) return -1;
  int64_t bytes;
  MakeWorkspace(*spec, MakePasses(*spec, MakeLayout(*spec)), nullptr, &bytes);
  return bytes;
}

extern "C" int hvdc_cuda_prepare(const hvdc_cuda_queue* queue) {
  hvdc_spec spec = {};  // empty: what is filled is in the workspace of every spec
  spec.codec = HVDC_FP32;
  EncodeJob job = {};
  const int status = Open(&spec, HVDC_DTYPE_FLOAT32, queue, &job, &job.passes);
  if (status != HVDC_OK) return status;
  const DeviceGuard guard(queue->device);
  if (guard.status() != HVDC_OK) return guard.status();
  // Up to where the tables end.
  const Workspace& all = job.workspace;
  const int64_t bytes =
      reinterpret_cast<uint8_t*>(all.tables + kTables) - all.control.As<uint8_t>();
  return Settle(Prepare(all.control, bytes, all.tables, StreamOf(*queue)), *queue);
}

extern "C" int hvdc_cuda_encode(const hvdc_spec* spec, const hvdc_noise* noise,
                                const void* gradient, int dtype, const hvdc_feedback* feedback,
                                void* payload, int64_t payload_bytes,
                                const hvdc_cuda_queue* queue) {
  EncodeJob job = {};
  if (!noise || !payload) return HVDC_BAD_SPEC;
  int status = Open(spec, dtype, queue, &job, &job.passes);
  if (status != HVDC_OK) return status;
  if (payload_bytes != job.layout.payload_bytes) return HVDC_BAD_SIZE;
  if (!Aligned(payload, 16) || !Aligned(gradient, ElementBytes(dtype))) return HVDC_CUDA_MISALIGNED;
  job.noise = MakeNoise(*noise);
  job.step = static_cast<uint32_t>(noise->step);
  job.gradient = gradient;
  job.payload = static_cast<uint8_t*>(payload);
  job.aligned = Aligned(gradient, 4 * ElementBytes(dtype));
  if (feedback) {
    if (!ValidResidualDtype(feedback->residual_dtype)) return HVDC_BAD_SPEC;
    const int64_t bytes = ElementBytes(feedback->residual_dtype);
    if (!Aligned(feedback->residual, bytes)) return HVDC_CUDA_MISALIGNED;
    job.mode = feedback->alpha == feedback->beta ? Mode::kShared : Mode::kGeneral;
    job.residual = feedback->residual;
    job.next_residual = feedback->residual;
    job.alpha = feedback->alpha;
    job.beta = feedback->beta;
    job.residual_dtype = feedback->residual_dtype;
    job.aligned = job.aligned && Aligned(job.residual, 4 * bytes);
  }
  const DeviceGuard guard(queue->device);
  if (guard.status() != HVDC_OK) return guard.status();
  using Jobs = Single<EncodeJob>;
  status = Run(StatisticsWork<Jobs>(job), job, StreamOf(*queue));
  if (status == HVDC_OK) status = Run(EncodeWork<Jobs>(job), job, StreamOf(*queue));
  if (status != HVDC_OK) {
    // The next call must not find what one kernel has left for another.
    cudaMemsetAsync(job.workspace.control, 0, sizeof(Control), StreamOf(*queue));
  }
  return Settle(status, *queue);
}

extern "C" int hvdc_cuda_decode_sum(const hvdc_spec* spec, uint64_t step, const void* payloads,
                                    int64_t payload_bytes, int64_t stride, int32_t count,
                                    float scale, void* out, int dtype, uint32_t* flags,
                                    hvdc_cuda_error* error, uint64_t tag,
                                    const hvdc_cuda_queue* queue) {
  DecodeJob job = {};
  if (count < 0 || (count && !payloads)) return HVDC_BAD_SPEC;
  if (count > HVDC_CUDA_MAX_PAYLOADS) return HVDC_CUDA_TOO_LARGE;
  Passes passes;
  int status = Open(spec, dtype, queue, &job, &passes);
  if (status != HVDC_OK) return status;
  if (payload_bytes != job.layout.payload_bytes) return HVDC_BAD_SIZE;
  if (count > 1 && stride < payload_bytes) return HVDC_BAD_SIZE;
  if (!Aligned(payloads, 16) || (count > 1 && stride % 16)) return HVDC_CUDA_MISALIGNED;
  if (!Aligned(out, ElementBytes(dtype))) return HVDC_CUDA_MISALIGNED;
  job.step = static_cast<uint32_t>(step);
  job.payloads = static_cast<const uint8_t*>(payloads);
  job.stride = stride;
  job.count = count;
  job.error = error;
  job.tag = tag;
  job.jobs = 1;
  job.scale = scale;
  job.out = out;
  job.aligned = Aligned(out, 4 * ElementBytes(dtype));
  job.flags = flags;
  const DeviceGuard guard(queue->device);
  status = guard.status();
  if (status == HVDC_OK) status = Run(DecodeWork<Single<DecodeJob>>(job), job, StreamOf(*queue));
  return Settle(status, *queue);
}

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
