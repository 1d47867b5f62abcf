// Gradients that are encoded, sent and decoded together.
#ifndef HVD_COMPRESS_TENSORFLOW_OPS_BUCKET_H_
#define HVD_COMPRESS_TENSORFLOW_OPS_BUCKET_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "coder.h"
#include "latch.h"
#include "ledger.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/tensor.h"

namespace hvd_compress {

// One gradient in one step.
struct Member {
  std::shared_ptr<const Coder> coder;
  tensorflow::Tensor gradient;
  // float32 or bfloat16 variables, empty until the first step: of this rank's gradient, and of the
  // average of the piece that it owns; and an int64 variable that counts exchanges.
  tensorflow::core::RefCountPtr<tensorflow::Var> residual, owned, exchanges;
  int64_t number = 0;  // of the gradient, in the noise and in the order of its owners
  std::vector<Piece> pieces;
  int64_t step = 0;           // the position in the noise, stamped on payloads
  double scale = 0;           // on the sum of the ranks' gradients
  tensorflow::Tensor result;  // once decoded, if status is ok
  absl::Status status;
};

// The members of one bucket in one step. Tracing adds gradients to it one by one, each in a branch
// of its own; the first member's branch encodes, sends and decodes for all of them.
class Bucket {
 public:
  // scales: one for each member, in the order of tracing.
  explicit Bucket(const std::vector<double>& scales);

  // Adds a member; `complete` is set with the last one.
  void Submit(int64_t index, Member member);

  // Lays out a message that has one payload of each piece: an owner's pieces follow each other, and
  // so do the owners' blocks. Without owners there is one block.
  void LayOut();

  std::vector<Member> members;
  struct Block {
    int64_t begin, size;  // bytes
  };
  std::vector<Block> blocks;
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

// The kernels for an operation's device; all of a compressor's operations on GPUs are on one GPU.
absl::StatusOr<std::shared_ptr<Kernels>> KernelsFor(tensorflow::OpKernelContext* context,
                                                    Ledger* ledger, const Coder& coder);

}  // namespace hvd_compress

#endif  // HVD_COMPRESS_TENSORFLOW_OPS_BUCKET_H_
