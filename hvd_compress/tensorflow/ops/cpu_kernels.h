// The CPU's kernels.
#ifndef HVD_COMPRESS_TENSORFLOW_OPS_CPU_KERNELS_H_
#define HVD_COMPRESS_TENSORFLOW_OPS_CPU_KERNELS_H_

#include "kernels.h"

namespace hvd_compress {

class CpuKernels : public Kernels {
 public:
  // threads: how many may work on one call.
  explicit CpuKernels(int threads) : threads_(threads) {}

  absl::Status Zero(void* memory, int64_t bytes) override;
  absl::Status Encode(const hvdc_spec& spec, const hvdc_noise& noise, const void* numbers,
                      int dtype, const Feedback* feedback, void* payload, int64_t bytes) override;
  absl::Status DecodeSum(const Payloads& payloads, const Senders& senders, float scale, void* out,
                         int dtype, bool* nonfinite) override;
  absl::Status FlagNonfinite(const void* halves, int64_t count, bool* nonfinite) override;
  absl::Status Scale(const void* numbers, int from, int64_t count, float scale, void* out,
                     int to) override;

 private:
  int threads_;
};

}  // namespace hvd_compress

#endif  // HVD_COMPRESS_TENSORFLOW_OPS_CPU_KERNELS_H_
