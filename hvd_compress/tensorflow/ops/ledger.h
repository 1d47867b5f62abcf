// What one compressor has encoded in the current step, so that the step can be undone, and what it
// has counted.
#ifndef HVD_COMPRESS_TENSORFLOW_OPS_LEDGER_H_
#define HVD_COMPRESS_TENSORFLOW_OPS_LEDGER_H_

#include <array>
#include <cstdint>
#include <map>
#include <string>

#include "hvdc.h"
#include "tensorflow/core/framework/resource_base.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/platform/mutex.h"

namespace hvd_compress {

// One encoded gradient, with everything that takes its residual back. The tensors are references:
// they keep the gradient's memory alive until the step is over, and copy nothing.
struct Sent {
  tensorflow::Tensor gradient, payload;
  tensorflow::core::RefCountPtr<tensorflow::Var> residual;
  hvdc_spec spec;
  float alpha, beta;
  int64_t step;
  int threads;
  bool undone = false;
};

// Cumulative; the order is that of hvd_compress/tensorflow/compressor.py.
enum Counter {
  kSteps,
  kTensors,
  kElements,
  kUncompressedBytes,
  kPayloadBytes,
  kDenseBytes,
  kEncodeSeconds,
  kDecodeSeconds,
  kCounters
};

// One non-finite gradient makes a whole step worthless, so that no residual may count it as sent.
// Which gradients those are is known only once they have been gathered, in any order; residuals
// that have moved on by then are taken back.
class Ledger : public tensorflow::ResourceBase {
 public:
  // Says how many gradients a graph encodes.
  void Expect(int64_t graph, int64_t count);

  // Starts a step of a graph.
  void Begin(int64_t graph);

  // Notes a gradient whose residual has been updated.
  void Encoded(int tensor, Sent sent);

  // Notes that a gradient is back; with `drop`, every residual of the step is or will be taken
  // back.
  absl::Status Decoded(bool drop);

  void Count(Counter counter, double value);
  std::array<double, kCounters> counters();

  std::string DebugString() const override { return "hvd_compress ledger"; }

 private:
  absl::Status Undo(Sent& sent);

  tensorflow::mutex mutex_;
  std::map<int64_t, int64_t> counts_;  // by graph
  std::map<int, Sent> sent_;           // by tensor
  int64_t expected_ = 0, decoded_ = 0;
  bool dropped_ = false;
  std::array<double, kCounters> counters_{};
};

// The C interface's name of a gradient's type.
int DtypeOf(tensorflow::DataType type);

}  // namespace hvd_compress

#endif  // HVD_COMPRESS_TENSORFLOW_OPS_LEDGER_H_
