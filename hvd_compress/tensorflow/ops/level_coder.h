// The norms and levels of one gradient: what the operations of integer sums share.
#ifndef HVD_COMPRESS_TENSORFLOW_OPS_LEVEL_CODER_H_
#define HVD_COMPRESS_TENSORFLOW_OPS_LEVEL_CODER_H_

#include <cstdint>

#include "gradient_codec.h"
#include "ledger.h"

namespace hvd_compress {

// On the CPU. Attributes: those of GradientCodec; count (elements, as traced), buckets (norms) and
// bits (of a lane).
class LevelCoder : public GradientCodec {
 public:
  explicit LevelCoder(tensorflow::OpKernelConstruction* context);

  int64_t count() const { return count_; }
  int64_t buckets() const { return buckets_; }

  // Words of 32 bits that the levels take.
  int64_t words() const { return words_; }

  // The largest norms that this rank could do with, its residual included.
  absl::Status Norms(tensorflow::OpKernelContext* context, const tensorflow::Tensor& gradient,
                     tensorflow::Var* residual, float* norms) const;

  // Levels with the norms that the ranks agreed on; moves the residual on.
  absl::Status Encode(tensorflow::OpKernelContext* context, const hvdc_noise& noise,
                      const tensorflow::Tensor& gradient, const tensorflow::Tensor& norms,
                      tensorflow::Var* residual, int32_t* words) const;

  // What takes back such a residual.
  TakeBack ToTakeBack(const tensorflow::Tensor& gradient, const tensorflow::Tensor& norms,
                      const tensorflow::Tensor& words,
                      tensorflow::core::RefCountPtr<tensorflow::Var> residual) const;

  // sum = scale * the units of the norms * the sum of levels.
  absl::Status Decode(const float* norms, const int32_t* words, float scale,
                      tensorflow::Tensor* sum) const;

  using GradientCodec::NoiseOf;

 private:
  absl::Status Check(int status, const char* what) const;

  int64_t count_, buckets_, words_ = 0;
  int bits_;
  hvdc_spec whole_;  // levels do not depend on rows and columns
};

}  // namespace hvd_compress

#endif  // HVD_COMPRESS_TENSORFLOW_OPS_LEVEL_CODER_H_
