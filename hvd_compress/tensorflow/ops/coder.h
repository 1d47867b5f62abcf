// Encodes and decodes one gradient's pieces: what the encoding and decoding operations share.
#ifndef HVD_COMPRESS_TENSORFLOW_OPS_CODER_H_
#define HVD_COMPRESS_TENSORFLOW_OPS_CODER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "hvdc.h"
#include "ledger.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"

namespace hvd_compress {

// Where a decoded message comes from: gathered from all ranks, whose payloads of one piece it
// holds, or the averages of owners, one payload for each piece.
enum class Source { kRanks, kOwners };

// Attributes: label, spec (an hvdc_spec without rows and columns), tensor, threads, alpha, beta.
class Coder {
 public:
  explicit Coder(tensorflow::OpKernelConstruction* context);

  // A gradient as one piece in its own shape; its size is -1 where the kernels refuse it.
  Piece Whole(const tensorflow::TensorShape& shape) const;

  // Contiguous pieces of a gradient, by their first elements and their lengths.
  std::vector<Piece> Parts(const std::vector<int64_t>& begins,
                           const std::vector<int64_t>& lengths) const;

  // Encodes the pieces of `numbers` into `message`, each with noise of its own stream, and moves
  // the residual on, a variable of one float32 an element that is empty at first.
  absl::Status Encode(tensorflow::OpKernelContext* context, const std::vector<Piece>& pieces,
                      const std::vector<int64_t>& streams, int64_t seed, int64_t step,
                      const tensorflow::Tensor& numbers, tensorflow::Tensor* message,
                      tensorflow::Var* residual) const;

  // What takes back such a residual.
  Sent ToTakeBack(std::vector<Piece> pieces, int64_t step, const tensorflow::Tensor& numbers,
                  const tensorflow::Tensor& message,
                  tensorflow::core::RefCountPtr<tensorflow::Var> residual) const;

  // sum = scale * the sum of the payloads of each piece, `copies` of which follow each other.
  // Sets `nonfinite` where a payload is flagged.
  absl::Status Decode(const std::vector<Piece>& pieces, Source source, int copies, float scale,
                      int64_t step, const tensorflow::Tensor& message, tensorflow::Tensor* sum,
                      bool* nonfinite) const;

  bool feedback() const { return alpha_ != 0; }
  const std::string& label() const { return label_; }

 private:
  absl::Status Prepare(tensorflow::OpKernelContext* context, int64_t count,
                       tensorflow::Var* residual) const;
  absl::Status Failure(int status, const std::string& whose, int64_t step) const;

  std::string label_;
  hvdc_spec spec_;
  int tensor_, threads_;
  float alpha_, beta_;
};

// The bytes of a message of these pieces, `copies` of each.
int64_t MessageBytes(const std::vector<Piece>& pieces, int copies);

template <typename T>
absl::Status Lookup(tensorflow::OpKernelContext* context, int input,
                    tensorflow::core::RefCountPtr<T>* resource) {
  return tensorflow::LookupResource(context, tensorflow::HandleFromInput(context, input), resource);
}

}  // namespace hvd_compress

#endif  // HVD_COMPRESS_TENSORFLOW_OPS_CODER_H_
