// The C interface of the CUDA kernels: what hvdc.h has for the CPU, on a stream.
//
// Every pointer is to memory of the queue's device, unless it says otherwise. Calls return as soon
// as the work is in the stream: they neither synchronise nor allocate, and can be captured into a
// CUDA graph (which then repeats the same step and noise). Payloads are aligned to 16 bytes,
// tensors to their elements. The bytes are those of hvdc.h.
#ifndef HVDC_CUDA_H_
#define HVDC_CUDA_H_

#include "hvdc.h"

#ifdef __cplusplus
extern "C" {
#endif

#define HVDC_CUDA_ABI_VERSION 4

enum { HVDC_CUDA_MAX_PAYLOADS = 1024 };

// What these calls may return beside hvdc_status.
enum hvdc_cuda_status {
  HVDC_CUDA_FAILED = 16,      // hvdc_cuda_message() says why
  HVDC_CUDA_TOO_LARGE = 17,   // 2^31 elements or words of the payload, or too many payloads
  HVDC_CUDA_MISALIGNED = 18,  // a payload, tensor or workspace is not aligned
  HVDC_CUDA_WORKSPACE = 19,   // the workspace is smaller than hvdc_cuda_workspace_bytes says
};

// Where work goes. Calls with the same workspace must be on the same stream, or ordered by events.
typedef struct {
  int32_t device;  // ordinal; calls leave the thread's current device as it was
  int32_t reserved;
  void* stream;     // cudaStream_t
  void* workspace;  // aligned to 256 bytes; hvdc_cuda_prepare has been called on it once
  int64_t workspace_bytes;
} hvdc_cuda_queue;

// What a payload that is not what it should be leaves behind. The first one stays until the caller
// sets status to 0. May be in host memory that the device can write (pinned, mapped).
typedef struct {
  uint32_t status;  // HVDC_OK, HVDC_BAD_HEADER or HVDC_BAD_CHECKSUM
  int32_t payload;  // its index in the call
  uint64_t tag;     // of the call
} hvdc_cuda_error;

HVDC_API uint32_t hvdc_cuda_abi_version(void);

// What the last failed call of this thread met, in CUDA's words; never null.
HVDC_API const char* hvdc_cuda_message(void);

// Bytes that any of the calls below need for this spec, or -1 where it is not valid or has an
// entropy code, for which there are no kernels.
HVDC_API int64_t hvdc_cuda_workspace_bytes(const hvdc_spec* spec);
// The same for hvdc_cuda_square_sum.
HVDC_API int64_t hvdc_cuda_square_sum_bytes(int64_t count);

// Fills new workspace memory with what the kernels expect in it.
HVDC_API int hvdc_cuda_prepare(const hvdc_cuda_queue* queue);

// Like hvdc_encode; feedback itself is in host memory, its residual is not.
HVDC_API int hvdc_cuda_encode(const hvdc_spec* spec, const hvdc_noise* noise, const void* gradient,
                              int dtype, const hvdc_feedback* feedback, void* payload,
                              int64_t payload_bytes, const hvdc_cuda_queue* queue);

// Like hvdc_decode_sum. If a payload is not what it should be, out becomes NaN as a whole, and
// error tells; tag comes back in it.
HVDC_API int hvdc_cuda_decode_sum(const hvdc_spec* spec, uint64_t step, const void* payloads,
                                  int64_t payload_bytes, int64_t stride, int32_t count, float scale,
                                  void* out, int dtype, int accumulate, hvdc_cuda_error* error,
                                  uint64_t tag, const hvdc_cuda_queue* queue);

// Copies before to after, count numbers, if *when is not 0: so a step can be dropped without the
// host's knowing.
HVDC_API int hvdc_cuda_restore(const float* before, float* after, int64_t count,
                               const uint32_t* when, const hvdc_cuda_queue* queue);

// Ors into *flags what all payloads' headers say of numbers that are not finite: 1 or 0.
HVDC_API int hvdc_cuda_collect_flags(const void* payloads, int64_t stride, int32_t count,
                                     uint32_t* flags, const hvdc_cuda_queue* queue);

// Like hvdc_square_sum, into *result.
HVDC_API int hvdc_cuda_square_sum(const float* values, int64_t count, double* result,
                                  const hvdc_cuda_queue* queue);

#ifdef __cplusplus
}
#endif

#endif  // HVDC_CUDA_H_
