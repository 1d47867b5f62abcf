// Gradients that are encoded, sent and decoded together.
#ifndef HVD_COMPRESS_TENSORFLOW_OPS_BUCKET_H_
#define HVD_COMPRESS_TENSORFLOW_OPS_BUCKET_H_

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels.h"
#include "latch.h"
#include "ledger.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/tensor.h"

namespace hvd_compress {

using VariableRef = tensorflow::core::RefCountPtr<tensorflow::Var>;

// One gradient in one step.
struct Member {
  tensorflow::Tensor gradient;
  // float32 or bfloat16 variables, empty until the first step: of this rank's gradient, and of the
  // average of the piece that it owns; and an int64 variable that counts exchanges.
  VariableRef residual, owned, exchanges;
  int64_t step = 0;           // the position in the noise, stamped on payloads
  tensorflow::Tensor result;  // once decoded, if status is ok
  absl::Status status;
};

// The members of one bucket in one step. Tracing adds gradients to it one by one, each in a branch
// of its own; the first member's branch encodes, sends and decodes for all of them.
class Bucket {
 public:
  explicit Bucket(std::shared_ptr<const BucketLayout> layout);

  // Adds a member; `complete` is set with the last one.
  void Submit(int64_t index, Member member);

  // Encodes a table of the layout from arrays of values, one for each member, into `message`, and
  // moves their residuals on. Where this fails for members, their payloads are zeros, and the
  // ledger has an error that begins with `who`.
  absl::Status Encode(tensorflow::OpKernelContext* context, Ledger* ledger,
                      const std::shared_ptr<Kernels>& kernels, const Table& table, Arrays arrays,
                      VariableRef Member::* residual, const char* who, uint8_t* message);

  std::shared_ptr<const BucketLayout> layout;
  std::vector<Member> members;
  const std::shared_ptr<Latch> complete, decoded;

 private:
  tensorflow::mutex mutex_;
  size_t missing_;
};

// The bucket that an operation's attribute "bucket" numbers, in the current step, and its ledger.
struct BucketOnDevice {
  tensorflow::core::RefCountPtr<Ledger> ledger;
  std::shared_ptr<Bucket> bucket;
};
absl::StatusOr<BucketOnDevice> LookupBucket(tensorflow::OpKernelContext* context, int ledger_input,
                                            int64_t bucket);

}  // namespace hvd_compress

#endif  // HVD_COMPRESS_TENSORFLOW_OPS_BUCKET_H_
