// The CUDA library's interface over the emulated kernels: calls return at once, and the machine
// works them off.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include <vector>

#include "hvdc_cuda.h"
#include "machine.h"

namespace {

void* kernels = nullptr;

template <typename Function>
Function Find(Function, const char* name) {
  void* const found = kernels ? dlsym(kernels, name) : nullptr;
  if (found == nullptr) {
    fprintf(stderr, "emulated GPU: %s is missing\n", name);
    abort();
  }
  return reinterpret_cast<Function>(found);
}
#define HVDC_EMULATED(name) Find(&name, #name)

// Ends the test at once, where a device would report the error at the next synchronization only.
void Put(const hvdc_cuda_queue& queue, const char* call,
         std::function<int(const hvdc_cuda_queue*)> work) {
  if (queue.stream != &emulated_gpu::Machine::Get() || queue.device != 0) {
    fprintf(stderr, "emulated GPU: %s: another stream\n", call);
    abort();
  }
  emulated_gpu::Machine::Get().Put([queue, call, work = std::move(work)] {
    hvdc_cuda_queue own = queue;
    own.stream = nullptr;
    if (const int status = work(&own)) {
      fprintf(stderr, "emulated GPU: %s: status %d\n", call, status);
      abort();
    }
  });
}

}  // namespace

extern "C" {

// Where libhvdc_cuda_emulated.so is.
HVDC_API int hvdc_emulated_gpu_open(const char* path) {
  kernels = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  return kernels != nullptr;
}

uint32_t hvdc_cuda_abi_version(void) { return HVDC_EMULATED(hvdc_cuda_abi_version)(); }
const char* hvdc_cuda_message(void) { return HVDC_EMULATED(hvdc_cuda_message)(); }

int hvdc_cuda_restore(const hvdc_cuda_residual* residuals, int64_t count, const uint32_t* when,
                      const hvdc_cuda_queue* queue) {
  const std::vector<hvdc_cuda_residual> list(residuals, residuals + count);
  Put(*queue, __func__, [=, run = HVDC_EMULATED(hvdc_cuda_restore)](const hvdc_cuda_queue* q) {
    return run(list.data(), count, when, q);
  });
  return HVDC_OK;
}

// A plan's own work on the host may be done at once.
int hvdc_cuda_plan_encode(const hvdc_cuda_entry* entries, int64_t count, int32_t device,
                          hvdc_cuda_plan** plan) {
  return HVDC_EMULATED(hvdc_cuda_plan_encode)(entries, count, device, plan);
}
int hvdc_cuda_plan_decode(const hvdc_cuda_entry* entries, int64_t count, int32_t payloads,
                          int32_t device, hvdc_cuda_plan** plan) {
  return HVDC_EMULATED(hvdc_cuda_plan_decode)(entries, count, payloads, device, plan);
}
int64_t hvdc_cuda_plan_bytes(const hvdc_cuda_plan* plan) {
  return HVDC_EMULATED(hvdc_cuda_plan_bytes)(plan);
}
// The real library has nothing of a plan on the host once a call has returned; here, work is to
// come.
void hvdc_cuda_plan_free(hvdc_cuda_plan* plan) {
  if (plan == nullptr) return;
  emulated_gpu::Machine::Get().Put([plan] { HVDC_EMULATED(hvdc_cuda_plan_free)(plan); });
}

int hvdc_cuda_plan_prepare(hvdc_cuda_plan* plan, void* memory, const hvdc_cuda_queue* queue) {
  Put(*queue, __func__, [=, run = HVDC_EMULATED(hvdc_cuda_plan_prepare)](const hvdc_cuda_queue* q) {
    return run(plan, memory, q);
  });
  return HVDC_OK;
}

int hvdc_cuda_encode_batch(const hvdc_cuda_plan* plan, const hvdc_cuda_array* arrays,
                           int64_t array_count, void* message, const hvdc_cuda_queue* queue) {
  const std::vector<hvdc_cuda_array> list(arrays, arrays + array_count);
  Put(*queue, __func__, [=, run = HVDC_EMULATED(hvdc_cuda_encode_batch)](const hvdc_cuda_queue* q) {
    return run(plan, list.data(), array_count, message, q);
  });
  return HVDC_OK;
}

int hvdc_cuda_decode_batch(const hvdc_cuda_plan* plan, const hvdc_cuda_array* arrays,
                           int64_t array_count, const void* rows, int64_t stride, float scale,
                           uint32_t* flags, hvdc_cuda_error* error, uint64_t tag,
                           const hvdc_cuda_queue* queue) {
  const std::vector<hvdc_cuda_array> list(arrays, arrays + array_count);
  Put(*queue, __func__, [=, run = HVDC_EMULATED(hvdc_cuda_decode_batch)](const hvdc_cuda_queue* q) {
    return run(plan, list.data(), array_count, rows, stride, scale, flags, error, tag, q);
  });
  return HVDC_OK;
}

}  // extern "C"
