// Batches of a bucket's tensors, and the kernels that encode and decode them on a device.
#ifndef HVD_COMPRESS_TENSORFLOW_OPS_KERNELS_H_
#define HVD_COMPRESS_TENSORFLOW_OPS_KERNELS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "hvdc_cuda.h"
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

// The payloads of a message: hvd_compress/tensorflow/coder.py makes the entries, whose arrays are
// the bucket's gradients. An entry with -1 rows is a whole gradient, of a shape that tracing does
// not know.
struct Table {
  explicit Table(std::vector<hvdc_cuda_entry> entries);

  // The elements of an array's entries.
  int64_t Elements(size_t array) const { return array < arrays.size() ? arrays[array].count : 0; }

  struct Array {
    int64_t count;    // elements in its entries
    bool used, kept;  // whether it has an entry, and one with a residual
  };
  const std::vector<hvdc_cuda_entry> entries;
  std::vector<int64_t> payloads;  // the bytes of each
  std::vector<Array> arrays;
  int64_t bytes = 0;  // of the message; negative where the kernels refuse an entry

  struct Plan;
  mutable std::map<int, std::shared_ptr<Plan>> plans;  // of GpuKernels, which locks them
};

// The part of a bucket that is known before a step.
struct BucketLayout {
  std::vector<std::string> labels;            // of the gradients
  double scale;                               // on the sum of the ranks' gradients
  std::vector<int64_t> sections;              // the bytes for each owner, or for all ranks
  std::shared_ptr<const Table> message, own;  // own: of an owner's averages, null without owners
};

// Messages of equal layout, one of each rank; or one message of all owners' averages.
struct Messages {
  std::shared_ptr<const BucketLayout> layout;
  std::shared_ptr<const Table> table;  // one of the layout's
  bool averages;                       // whether owners sent them
  const uint8_t* first;
  int64_t stride;  // bytes from the beginning of one message to that of the next
  int count;

  // The error for an altered payload. status: HVDC_BAD_HEADER, HVDC_BAD_CHECKSUM or HVDC_BAD_CODES;
  // HVDC_OK where zeros came in its place.
  absl::Status Altered(int64_t entry, int message, int status) const;
};

using Arrays = std::vector<hvdc_cuda_array>;

// Pointers are to memory of the device; dtype is an hvdc_dtype. On a device that the host does not
// wait for, these calls return at once, and run in the order in which they are made.
class Kernels {
 public:
  virtual ~Kernels() = default;

  virtual absl::Status Zero(void* memory, int64_t bytes) = 0;

  // Encodes all entries of a table, as hvdc_encode_batch does. The next residuals are in separate
  // memory.
  virtual absl::Status Encode(const BucketLayout& layout, const Table& table, const Arrays& arrays,
                              void* message) = 0;

  // Arrays = scale * the sums of the payloads. Sets `nonfinite` where one is flagged, if the host
  // can know; otherwise RestoreIfFlagged does.
  virtual absl::Status DecodeSum(const Messages& messages, const Arrays& arrays, float scale,
                                 bool* nonfinite) = 0;

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

// The CPU's kernels. threads: how many may work on one call.
std::shared_ptr<Kernels> MakeCpuKernels(int threads);

}  // namespace hvd_compress

#endif  // HVD_COMPRESS_TENSORFLOW_OPS_KERNELS_H_
