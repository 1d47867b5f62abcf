// The interface of the kernels for a gradient's numbers and payloads, on the device with them.
#ifndef HVD_COMPRESS_TENSORFLOW_OPS_KERNELS_H_
#define HVD_COMPRESS_TENSORFLOW_OPS_KERNELS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "hvdc.h"
#include "tensorflow/core/framework/types.pb.h"

namespace hvd_compress {

// The functions of a codec: the native library's, or Python's for a codec without kernels.
struct CodecFunctions {
  decltype(&hvdc_payload_bytes) payload_bytes;
  decltype(&hvdc_encode_batch) encode_batch;
  decltype(&hvdc_decode_batch) decode_batch;
};

const CodecFunctions& FunctionsOf(const hvdc_spec& spec);

// The C interface's name of a type.
int DtypeOf(tensorflow::DataType type);

// Payloads of one tensor.
struct Payloads {
  const hvdc_spec& spec;
  int64_t step;
  const uint8_t* first;
  int64_t bytes;   // of each
  int64_t stride;  // bytes from the beginning of one to that of the next
  int count;
};

// The senders of the payloads that one call decodes, for its errors: payloads of one piece of a
// gradient, in the order of ranks.
struct Senders {
  std::string label;  // the gradient's name
  size_t first;       // the rank that sent the first payload
  bool owners;        // whether they sent averages
  int64_t step;
};

// The error for an altered payload. status: HVDC_BAD_HEADER, HVDC_BAD_CHECKSUM or HVDC_BAD_CODES.
absl::Status BadPayload(const Senders& senders, int status, int copy);

// Error feedback with the next residual in separate memory.
struct Feedback {
  float alpha, beta;
  const void* residual;
  void* next;
  int residual_dtype;
};

// Pointers are to memory of the device; dtype is an hvdc_dtype. On a device that the host does not
// wait for, these calls return at once, and run in the order in which they are made.
class Kernels {
 public:
  virtual ~Kernels() = default;

  virtual absl::Status Zero(void* memory, int64_t bytes) = 0;

  // Encodes one tensor, as hvdc_encode_batch does.
  virtual absl::Status Encode(const hvdc_spec& spec, const hvdc_noise& noise, const void* numbers,
                              int dtype, const Feedback* feedback, void* payload,
                              int64_t bytes) = 0;

  // out = scale * the sum of the payloads. Sets `nonfinite` where one is flagged, if the host can
  // know; otherwise RestoreIfFlagged does.
  virtual absl::Status DecodeSum(const Payloads& payloads, const Senders& senders, float scale,
                                 void* out, int dtype, bool* nonfinite) = 0;

  // Sets `nonfinite`, as DecodeSum does, where one of `count` float16 numbers is not finite.
  virtual absl::Status FlagNonfinite(const void* halves, int64_t count, bool* nonfinite) = 0;

  // Copies count numbers from before to after if a payload of this step is flagged, on a device
  // whose flags the host does not know.
  virtual absl::Status RestoreIfFlagged(const void* /*before*/, void* /*after*/, int /*dtype*/,
                                        int64_t /*count*/) {
    return absl::OkStatus();
  }

  // out = scale * numbers.
  virtual absl::Status Scale(const void* numbers, int from, int64_t count, float scale, void* out,
                             int to) = 0;
};

}  // namespace hvd_compress

#endif  // HVD_COMPRESS_TENSORFLOW_OPS_KERNELS_H_
