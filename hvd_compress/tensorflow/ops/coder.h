// A gradient's codec, which encodes and decodes the gradient's pieces.
#ifndef HVD_COMPRESS_TENSORFLOW_OPS_CODER_H_
#define HVD_COMPRESS_TENSORFLOW_OPS_CODER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "hvdc.h"
#include "kernels.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_var.h"

namespace hvd_compress {

// Numbers that are encoded as a tensor of their own: a gradient, or a range of one.
struct Piece {
  hvdc_spec spec;
  int64_t begin, length;  // elements of the gradient before it, and its own
  int64_t bytes;          // the size of its payload; negative where the kernels refuse it
  int64_t offset;         // bytes of the message before its payload
};

// Attributes: label; spec (an hvdc_spec without rows and columns); seed (of the noise); threads;
// alpha, beta (of error feedback); begins, lengths (the pieces for each owner of gradient 0; none
// for the whole gradient as one piece); streams (the rank in each piece's noise key); own,
// own_stream (the piece that this rank owns, and the rank in the noise key of its average).
class Coder {
 public:
  explicit Coder(tensorflow::OpKernelConstruction* context);

  const std::string& label() const { return label_; }
  bool feedback() const { return alpha_ != 0; }
  int threads() const { return threads_; }
  int own() const { return own_; }

  // Whether a gradient has the elements that tracing counted on.
  absl::Status CheckTraced(const tensorflow::Tensor& gradient) const;

  // The pieces of a gradient of this shape for each owner, without offsets: the gradient's number
  // is that of the first piece's owner, as in hvd_compress/exchanges/shards.py.
  std::vector<Piece> Pieces(const tensorflow::TensorShape& shape, int64_t number) const;

  // The ranks in the noise keys of the pieces, and of the average of the piece that this rank owns.
  const std::vector<int64_t>& streams() const { return streams_; }
  int64_t own_stream() const { return own_stream_; }

  // Encodes pieces of a gradient, or of an average, into `message`, and moves the residual on, a
  // variable of one float32 or bfloat16 an element that is empty at first; `before` is what it was.
  // number, step: the gradient's, in the noise.
  absl::Status Encode(tensorflow::OpKernelContext* context, Kernels* kernels,
                      const std::vector<Piece>& pieces, const std::vector<int64_t>& streams,
                      int64_t number, int64_t step, const tensorflow::Tensor& numbers,
                      tensorflow::Tensor* message, tensorflow::Var* residual,
                      tensorflow::Tensor* before) const;

 private:
  Piece PieceOf(const tensorflow::TensorShape& shape, int64_t begin) const;
  hvdc_noise NoiseOf(int64_t stream, int64_t number, int64_t step) const;

  // The residual as it is, one number an element, zeros at first. The caller holds the variable's
  // lock, and this coder has feedback.
  absl::Status Current(tensorflow::OpKernelContext* context, Kernels* kernels, int64_t count,
                       tensorflow::Var* residual, tensorflow::Tensor* now) const;

  std::string label_;
  hvdc_spec spec_;
  int64_t seed_, own_, own_stream_;
  int threads_;
  float alpha_, beta_;
  std::vector<int64_t> begins_, lengths_, streams_;
};

}  // namespace hvd_compress

#endif  // HVD_COMPRESS_TENSORFLOW_OPS_CODER_H_
