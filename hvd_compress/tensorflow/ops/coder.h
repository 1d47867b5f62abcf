// Encodes and decodes one gradient's pieces: what the encoding and decoding operations share.
#ifndef HVD_COMPRESS_TENSORFLOW_OPS_CODER_H_
#define HVD_COMPRESS_TENSORFLOW_OPS_CODER_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "gradient_codec.h"
#include "ledger.h"

namespace hvd_compress {

// Numbers that are encoded as a tensor of their own: a gradient, or a range of one.
struct Piece {
  hvdc_spec spec;
  int64_t begin;   // elements of the gradient before it
  int64_t offset;  // bytes of the message before its payload, where there is one of each piece
  int64_t bytes;   // of its payload
};

// Where a decoded message comes from: gathered from all ranks, whose payloads of one piece it
// holds, or the averages of owners.
enum class Source { kRanks, kOwners };

class Coder : public GradientCodec {
 public:
  using GradientCodec::GradientCodec;

  // A gradient as one piece in its own shape; its size is -1 where the kernels refuse it.
  Piece Whole(const tensorflow::TensorShape& shape) const;

  // Contiguous pieces of a gradient, by their first elements and their lengths.
  std::vector<Piece> Parts(const std::vector<int64_t>& begins,
                           const std::vector<int64_t>& lengths) const;

  // Encodes the pieces of `numbers` into `message`, each with noise of its own stream, and moves
  // the residual on, a variable of one float32 an element that is empty at first.
  absl::Status Encode(tensorflow::OpKernelContext* context, Kernels* kernels,
                      const std::vector<Piece>& pieces, const std::vector<int64_t>& streams,
                      int64_t seed, int64_t step, const tensorflow::Tensor& numbers,
                      tensorflow::Tensor* message, tensorflow::Var* residual) const;

  // What takes back such a residual. It refers to the numbers' memory, and copies nothing.
  TakeBack ToTakeBack(std::shared_ptr<Kernels> kernels, std::vector<Piece> pieces, int64_t step,
                      const tensorflow::Tensor& numbers, const tensorflow::Tensor& message,
                      tensorflow::core::RefCountPtr<tensorflow::Var> residual) const;

  // sum = scale * the sum of the payloads of each piece, `copies` of which follow each other.
  // Sets `nonfinite` where a payload is flagged, as Kernels does.
  absl::Status Decode(Kernels* kernels, const std::vector<Piece>& pieces, Source source, int copies,
                      float scale, int64_t step, const tensorflow::Tensor& message,
                      tensorflow::Tensor* sum, bool* nonfinite) const;
};

// The bytes of a message of these pieces, `copies` of each.
int64_t MessageBytes(const std::vector<Piece>& pieces, int copies);

}  // namespace hvd_compress

#endif  // HVD_COMPRESS_TENSORFLOW_OPS_CODER_H_
