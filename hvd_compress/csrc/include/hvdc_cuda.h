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

#define HVDC_CUDA_ABI_VERSION 12

enum { HVDC_CUDA_MAX_PAYLOADS = 1024 };

// The values that these calls return beside those of hvdc_status.
enum hvdc_cuda_status {
  HVDC_CUDA_FAILED = 16,      // hvdc_cuda_message() says why
  HVDC_CUDA_TOO_LARGE = 17,   // 2^31 elements or words of the payload, or too many payloads
  HVDC_CUDA_MISALIGNED = 18,  // a payload, tensor or plan's memory is not aligned
};

// A destination of work.
typedef struct {
  int32_t device;  // ordinal; calls leave the thread's current device as it was
  int32_t reserved;
  void* stream;  // cudaStream_t
} hvdc_cuda_queue;

// The error of an altered payload: that of the first one in a batch's first entry with any. It
// stays until the caller sets status to 0. May be in host memory that the device can write (pinned,
// mapped). Calls with the same one must be on the same stream, or ordered by events.
typedef struct {
  uint32_t status;  // HVDC_OK, HVDC_BAD_HEADER, HVDC_BAD_CHECKSUM or HVDC_BAD_CODES
  int32_t payload;  // its index in the call
  uint64_t tag;     // of the call; in a batch, plus the number of the entry
} hvdc_cuda_error;

HVDC_API uint32_t hvdc_cuda_abi_version(void);

// The error of this thread's last failed call, in CUDA's words; never null.
HVDC_API const char* hvdc_cuda_message(void);

// A residual, and what a step has made of it: count numbers each.
typedef struct {
  const void* before;
  void* after;
  int64_t count;
  int32_t dtype;  // float32 or bfloat16
  int32_t reserved;
} hvdc_cuda_residual;

// Copies before to after if *when is not 0: so a step can be dropped without the host's knowing.
// The list itself is in host memory.
HVDC_API int hvdc_cuda_restore(const hvdc_cuda_residual* residuals, int64_t count,
                               const uint32_t* when, const hvdc_cuda_queue* queue);

// Batches: many tensors of any codecs, sizes and dtypes in one message, with one launch for all
// that have the same kernel. Tables of entries and arrays are in host memory, and read before a
// call returns.

// A tensor's place in a batch.
typedef struct {
  hvdc_spec spec;
  hvdc_noise noise;        // encoding; its step is the array's
  float alpha, beta;       // encoding with feedback
  int32_t feedback;        // encoding: whether there is a residual
  int32_t array;           // the number of the array in which it stands
  int64_t first;           // its first element there
  int64_t offset;          // of the payload in the message: bytes, a multiple of 16
  int32_t residual_dtype;  // as in hvdc_tensor
  int32_t reserved;
} hvdc_cuda_entry;

// An array of a call, which holds one or several tensors one behind the other.
typedef struct {
  void* values;  // encoding: the gradient, only read; decoding: the output
  // The same as in hvdc_tensor; ignored where no tensor of the array has feedback.
  const void* residual;
  void* next_residual;
  uint64_t step;
  int32_t dtype;  // of values: hvdc_dtype
  int32_t reserved;
} hvdc_cuda_array;

// The part that a batch's calls share. Freed by hvdc_cuda_plan_free, which does not wait.
typedef struct hvdc_cuda_plan hvdc_cuda_plan;

HVDC_API int hvdc_cuda_plan_encode(const hvdc_cuda_entry* entries, int64_t count, int32_t device,
                                   hvdc_cuda_plan** plan);
// payloads: how many messages each call decodes.
HVDC_API int hvdc_cuda_plan_decode(const hvdc_cuda_entry* entries, int64_t count, int32_t payloads,
                                   int32_t device, hvdc_cuda_plan** plan);
HVDC_API int64_t hvdc_cuda_plan_bytes(const hvdc_cuda_plan* plan);
// Gives a plan memory of so many bytes, aligned to 256, which is its own from then on, and fills
// it. Not to be captured into a CUDA graph.
HVDC_API int hvdc_cuda_plan_prepare(hvdc_cuda_plan* plan, void* memory,
                                    const hvdc_cuda_queue* queue);
HVDC_API void hvdc_cuda_plan_free(hvdc_cuda_plan* plan);

// Like hvdc_encode_batch. Calls with the same plan must be on the same stream, or ordered by
// events.
HVDC_API int hvdc_cuda_encode_batch(const hvdc_cuda_plan* plan, const hvdc_cuda_array* arrays,
                                    int64_t array_count, void* message,
                                    const hvdc_cuda_queue* queue);

// Like hvdc_decode_batch. If a payload is not what it should be, the outputs of its entry become
// NaN as a whole, and error tells: payload is the number of the row. Ors into *flags, unless it is
// null, what the headers say of numbers that are not finite: 1 or 0; and 1 if there is an error.
HVDC_API int hvdc_cuda_decode_batch(const hvdc_cuda_plan* plan, const hvdc_cuda_array* arrays,
                                    int64_t array_count, const void* rows, int64_t stride,
                                    float scale, uint32_t* flags, hvdc_cuda_error* error,
                                    uint64_t tag, const hvdc_cuda_queue* queue);

#ifdef __cplusplus
}
#endif

#endif  // HVDC_CUDA_H_
