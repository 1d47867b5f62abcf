// The C interface of the native kernels: plain pointers, no Python and no framework.
//
// The NumPy reference (hvd_compress/kernels/reference.py) and docs/format.md define the functions'
// results; the bytes are the same. Calls are independent of each other and may run
// concurrently. Tensors are flat, row-major arrays; payloads are aligned to 4 bytes.
#ifndef HVDC_H_
#define HVDC_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define HVDC_API __attribute__((visibility("default")))
#else
#define HVDC_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define HVDC_ABI_VERSION 10

enum hvdc_codec {
  HVDC_ONEBIT = 1,
  HVDC_INT8 = 2,
  HVDC_TERNARY = 3,
  HVDC_ECQ = 4,
  HVDC_FP16 = 5,
  HVDC_BF16 = 6,
  HVDC_FP32 = 7,
  HVDC_TOPK = 8
};
enum hvdc_dtype { HVDC_DTYPE_FLOAT32 = 0, HVDC_DTYPE_FLOAT16 = 1, HVDC_DTYPE_BFLOAT16 = 2 };
enum hvdc_grouping { HVDC_CONTIGUOUS = 0, HVDC_TENSOR = 1, HVDC_ROW = 2, HVDC_COLUMN = 3 };
enum hvdc_int8_variant {
  HVDC_LINEAR = 0,
  HVDC_DYNAMIC = 1,
  HVDC_STATIC = 2,
  HVDC_MANTISSA = 3,
  HVDC_E4M3 = 4,
  HVDC_E5M2 = 5
};
enum hvdc_rounding { HVDC_NEAREST = 0, HVDC_STOCHASTIC = 1 };
enum hvdc_norm { HVDC_L2 = 0, HVDC_LINF = 1, HVDC_ROTATED_LINF = 2 };
enum hvdc_coding { HVDC_PLAIN = 0, HVDC_ENTROPY = 1 };

// 0 is success; everything else leaves the outputs unspecified, and nothing else touched.
enum hvdc_status {
  HVDC_OK = 0,
  HVDC_BAD_SPEC = 1,      // a field of the spec is out of range
  HVDC_BAD_SIZE = 2,      // a payload's size is not what the spec asks for, or its place is wrong
  HVDC_BAD_HEADER = 3,    // magic, version, codec, configuration, count or step differ
  HVDC_BAD_CHECKSUM = 4,  // the payload has been altered
  HVDC_NO_MEMORY = 5,     // scratch memory could not be allocated
  HVDC_BAD_CODES = 6,     // a length, a table or an index that no encoder writes
};

// A codec's configuration and a tensor's shape. Fields that a codec does not use are 0.
typedef struct {
  uint32_t codec;        // hvdc_codec
  uint32_t config_hash;  // stamped on payloads and demanded of them
  uint32_t variant;   // Int8: hvdc_int8_variant; ECQ: hvdc_norm; BF16: hvdc_rounding; TopK: bits of
                      // a value
  uint32_t grouping;  // hvdc_grouping
  uint32_t group;     // elements of a group, where contiguous: a multiple of 64 up to 65,536
  uint32_t levels;    // ECQ: s, 1 to 127; TopK: elements that a group sends
  float factor;       // Int8 static and mantissa: 10^offset; Ternary: c, 0 does not clip
  uint32_t coding;    // Ternary, ECQ: hvdc_coding
  int64_t rows, columns;  // the tensor as a matrix; their product is the number of elements
} hvdc_spec;

// The position of a tensor in the noise.
typedef struct {
  uint32_t seed, rank, tensor, reserved;
  uint64_t step;
} hvdc_noise;

HVDC_API uint32_t hvdc_abi_version(void);

// Name of the instruction set in use: "avx512", "avx2" or "plain"; null before the first use where
// the environment variable HVDC_ISA is not empty and not one that the machine has. hvdc_set_isa
// chooses another one that the machine has (for tests; not while other calls run) and returns
// HVDC_BAD_SPEC where it cannot.
HVDC_API const char* hvdc_isa(void);
HVDC_API int hvdc_set_isa(const char* name);

// Exact size of a payload in bytes, or -1 where the spec is not valid. With HVDC_ENTROPY it is what
// a payload may take: its header says how much of it is used, and the rest has no meaning.
HVDC_API int64_t hvdc_payload_bytes(const hvdc_spec* spec);

// Batches: many tensors of any codecs, sizes and dtypes in one message, by one call. The threads
// share the work of all tensors. Calls on different batches, and on different messages, are
// independent.

// A tensor of a batch. What a call does not use it does not look at.
typedef struct {
  hvdc_spec spec;
  hvdc_noise noise;  // its step is stamped on payloads, and demanded of them when decoding
  void* values;      // encoding: the gradient, only read; decoding: the output
  // Error feedback: x = g + alpha h is encoded, h <- (beta h + g) - decoded is kept. Both null
  // without it. The residual before encoding, and where the residual after it goes: the same
  // memory, or none of it. Elsewhere, the residual before is only read, and what stays as it is, is
  // copied.
  const void* residual;
  void* next_residual;
  float alpha, beta;
  int64_t offset;          // place of the payload in the message: bytes, a multiple of 4
  int64_t payload_bytes;   // the size of the payload
  int32_t dtype;           // the hvdc_dtype of values
  uint32_t flags;          // out, of payloads: 1 where one is of an Inf or a NaN, else 0
  int32_t residual_dtype;  // HVDC_DTYPE_FLOAT32, or HVDC_DTYPE_BFLOAT16: rounded at random
  int32_t reserved;
} hvdc_tensor;

// In all of these, *bad receives the number of the tensor that an error is about, -1 where there is
// none, and may be null; the message may not, unless count is 0.

// Encodes every tensor into its place in the message; bytes between payloads are left alone.
HVDC_API int hvdc_encode_batch(hvdc_tensor* tensors, int64_t count, void* message, int threads,
                               int64_t* bad);

// values = scale * (decoded[0] + decoded[1] + ...), over the ranks' messages, which stand stride
// bytes apart, in that order from +0, in float32, rounded to dtype last. *bad_rank receives the
// number of the rank whose payload an error is about, else -1; values are unspecified then.
HVDC_API int hvdc_decode_batch(hvdc_tensor* tensors, int64_t count, const void* message,
                               int64_t stride, int32_t ranks, float scale, int threads,
                               int64_t* bad, int32_t* bad_rank);

#ifdef __cplusplus
}
#endif

#endif  // HVDC_H_
