// The CPU's kernels.
#include <algorithm>
#include <cstring>

#include "codec/layout.h"
#include "kernels.h"
#include "tensorflow/core/framework/numeric_types.h"
#include "tensorflow/core/platform/errors.h"

namespace hvd_compress {
namespace {

int64_t BytesOf(int dtype) { return dtype == HVDC_DTYPE_FLOAT32 ? 4 : 2; }

// Whether zeros came in a payload's place, as in hvd_compress/exchanges/shards.py.
bool IsFailure(const uint8_t* payload) {
  const hvdc::Header none{};
  return std::memcmp(payload, &none, sizeof(none)) == 0;
}

std::vector<hvdc_tensor> Tensors(const Table& table, const Arrays& arrays) {
  std::vector<hvdc_tensor> tensors(table.entries.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const hvdc_cuda_entry& entry = table.entries[i];
    const hvdc_cuda_array& array = arrays[static_cast<size_t>(entry.array)];
    hvdc_tensor& tensor = tensors[i];
    tensor.spec = entry.spec;
    tensor.noise = entry.noise;
    tensor.noise.step = array.step;
    tensor.values = static_cast<char*>(array.values) + entry.first * BytesOf(array.dtype);
    tensor.dtype = array.dtype;
    tensor.offset = entry.offset;
    tensor.payload_bytes = table.payloads[i];
    if (!entry.feedback || !array.next_residual) continue;
    const int64_t first = entry.first * BytesOf(entry.residual_dtype);
    tensor.residual = static_cast<const char*>(array.residual) + first;
    tensor.next_residual = static_cast<char*>(array.next_residual) + first;
    tensor.residual_dtype = entry.residual_dtype;
    tensor.alpha = entry.alpha;
    tensor.beta = entry.beta;
  }
  return tensors;
}

// Calls `work(functions, tensors, count)` for all tensors: once, where all codecs have kernels.
// Returns its status; *bad is the number of the tensor that an error is about.
template <typename Work>
int Call(std::vector<hvdc_tensor>* tensors, int64_t* bad, const Work& work) {
  const auto count = static_cast<int64_t>(tensors->size());
  for (int64_t begin = 0, end; begin < count; begin = end) {
    hvdc_tensor* const first = tensors->data() + begin;
    const CodecFunctions& functions = FunctionsOf(first->spec);
    for (end = begin + 1; end < count; ++end) {
      if (&FunctionsOf(tensors->data()[end].spec) != &functions) break;
    }
    *bad = 0;
    const int status = work(functions, first, end - begin);
    *bad = begin + std::max(*bad, int64_t{0});
    if (status != HVDC_OK) return status;
  }
  return HVDC_OK;
}

// Converts to float32, or from it.
template <typename From, typename To>
void ScaleInto(const void* numbers, int64_t count, float scale, void* out) {
  const auto* from = static_cast<const From*>(numbers);
  auto* to = static_cast<To*>(out);
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<To>(static_cast<float>(from[i]) * scale);
}

class CpuKernels : public Kernels {
 public:
  explicit CpuKernels(int threads) : threads_(threads) {}

  absl::Status Zero(void* memory, int64_t bytes) override {
    if (bytes) std::memset(memory, 0, bytes);
    return absl::OkStatus();
  }

  absl::Status Encode(const BucketLayout& layout, const Table& table, const Arrays& arrays,
                      void* message) override {
    std::vector<hvdc_tensor> tensors = Tensors(table, arrays);
    int64_t bad;
    const int status =
        Call(&tensors, &bad, [&](const CodecFunctions& of, hvdc_tensor* first, int64_t count) {
          return of.encode_batch(first, count, message, threads_, &bad);
        });
    if (status == HVDC_OK) return absl::OkStatus();
    const auto array = static_cast<size_t>(table.entries[static_cast<size_t>(bad)].array);
    return tensorflow::errors::Internal(layout.labels[array], ": encoding failed with status ",
                                        status);
  }

  absl::Status DecodeSum(const Messages& messages, const Arrays& arrays, float scale,
                         bool* nonfinite) override {
    std::vector<hvdc_tensor> tensors = Tensors(*messages.table, arrays);
    int64_t bad;
    int32_t rank = -1;
    const int status =
        Call(&tensors, &bad, [&](const CodecFunctions& of, hvdc_tensor* first, int64_t count) {
          return of.decode_batch(first, count, messages.first, messages.stride, messages.count,
                                 scale, threads_, &bad, &rank);
        });
    if (status != HVDC_OK) {
      const int64_t offset = tensors[static_cast<size_t>(bad)].offset;
      const bool none = rank >= 0 && IsFailure(messages.first + rank * messages.stride + offset);
      return messages.Altered(bad, rank, none ? HVDC_OK : status);
    }
    for (const hvdc_tensor& tensor : tensors) *nonfinite = *nonfinite || tensor.flags;
    return absl::OkStatus();
  }

  absl::Status FlagNonfinite(const void* halves, int64_t count, bool* nonfinite) override {
    constexpr uint16_t kExponent = 0x7c00;
    const auto* const bits = static_cast<const uint16_t*>(halves);
    bool found = false;
    for (int64_t i = 0; i < count; ++i) found |= (bits[i] & kExponent) == kExponent;
    *nonfinite = *nonfinite || found;
    return absl::OkStatus();
  }

  absl::Status Scale(const void* numbers, int from, int64_t count, float scale, void* out,
                     int to) override {
    const int other = from == HVDC_DTYPE_FLOAT32 ? to : from;
    auto* into = ScaleInto<float, float>;
    if (other == HVDC_DTYPE_FLOAT16) {
      into = other == to ? ScaleInto<float, Eigen::half> : ScaleInto<Eigen::half, float>;
    } else if (other == HVDC_DTYPE_BFLOAT16) {
      into = other == to ? ScaleInto<float, tensorflow::bfloat16>
                         : ScaleInto<tensorflow::bfloat16, float>;
    }
    into(numbers, count, scale, out);
    return absl::OkStatus();
  }

 private:
  int threads_;
};

}  // namespace

std::shared_ptr<Kernels> MakeCpuKernels(int threads) {
  return std::make_shared<CpuKernels>(threads);
}

}  // namespace hvd_compress
