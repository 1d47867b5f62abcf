// What works on a gradient's numbers and payloads, on the device that they are on.
#ifndef HVD_COMPRESS_TENSORFLOW_OPS_KERNELS_H_
#define HVD_COMPRESS_TENSORFLOW_OPS_KERNELS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "hvdc.h"
#include "tensorflow/core/framework/types.pb.h"

namespace hvd_compress {

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

// Whose payloads one call decodes, for its errors: those of one piece of a gradient. Pieces have
// senders in the order of ranks, over and over: with two copies of three pieces, rank 4 sent the
// second copy of the second piece.
struct Senders {
  std::string label;  // the gradient's
  size_t piece, pieces;
  bool owners;  // who sent averages
  int64_t step;
};

// What is said of a payload that is not what it should be. status: HVDC_BAD_HEADER,
// HVDC_BAD_CHECKSUM or HVDC_BAD_CODES.
absl::Status BadPayload(const Senders& senders, int status, int copy);

// As hvdc_feedback, with the next residual in memory of its own.
struct Feedback {
  float alpha, beta;
  const void* residual;
  void* next;
  int residual_dtype;
};

// Pointers are to memory of the device; dtype is an hvdc_dtype. Where the device works behind the
// host's back, so do these calls, in the order in which they are made.
class Kernels {
 public:
  virtual ~Kernels() = default;

  virtual absl::Status Zero(void* memory, int64_t bytes) = 0;

  // As hvdc_encode_batch, of one tensor.
  virtual absl::Status Encode(const hvdc_spec& spec, const hvdc_noise& noise, const void* numbers,
                              int dtype, const Feedback* feedback, void* payload,
                              int64_t bytes) = 0;

  // out = scale * the sum of the payloads. Sets `nonfinite` where one is flagged, if the host can
  // know; otherwise RestoreIfFlagged does.
  virtual absl::Status DecodeSum(const Payloads& payloads, const Senders& senders, float scale,
                                 void* out, int dtype, bool* nonfinite) = 0;

  // Sets `nonfinite`, as DecodeSum does, where one of `count` float16 numbers is not finite.
  virtual absl::Status FlagNonfinite(const void* halves, int64_t count, bool* nonfinite) = 0;

  // Where the host does not know flags: copies before to after, count numbers, if a payload of this
  // step is flagged.
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
