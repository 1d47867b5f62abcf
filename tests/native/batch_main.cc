// Batches of random tensors, to be run under sanitizers: what single calls write, with any number
// of threads and several callers at once.
//
//   batch_main SECONDS [SEED]
#include <chrono>
#include <memory>
#include <thread>

#include "inputs.h"

namespace {

using inputs::Bytes;
using inputs::Input;
using inputs::Random;
using inputs::Result;

// Tensors with their places in a message, and residuals of exact size.
struct Batch {
  explicit Batch(Random* random) : in_place((*random)() % 2) {
    const size_t count = (*random)() % 6;
    for (size_t i = 0; i < count; ++i) {
      inputs.emplace_back(new Input(random));
      const Input& input = *inputs.back();
      before.push_back(input.residual);
      after.emplace_back(in_place ? 0 : input.residual.size());
      hvdc_tensor tensor = input.Tensor(before.back().data());
      if (input.feedback && !in_place) tensor.next_residual = after.back().data();
      tensors.push_back(tensor);
    }
    threads = static_cast<int>(1 + (*random)() % 4);
  }

  // Their places in the message, some bytes apart.
  void Place(Random* random, const std::vector<int64_t>& sizes) {
    bytes = 0;
    for (size_t i = 0; i < tensors.size(); ++i) {
      bytes += 4 * static_cast<int64_t>((*random)() % 5);
      tensors[i].offset = bytes;
      tensors[i].payload_bytes = sizes[i];
      bytes += sizes[i];
    }
  }

  int64_t Count() const { return static_cast<int64_t>(tensors.size()); }
  const Bytes& Next(size_t i) const { return in_place ? before[i] : after[i]; }

  std::vector<std::unique_ptr<Input>> inputs;
  std::vector<Bytes> before, after;
  std::vector<hvdc_tensor> tensors;
  int64_t bytes = 0;
  int threads;
  bool in_place;
};

// All payloads in one message, and two such messages decoded.
void CheckPayloads(Random* random) {
  Batch batch(random);
  std::vector<int64_t> sizes;
  for (const hvdc_tensor& tensor : batch.tensors) sizes.push_back(hvdc_payload_bytes(&tensor.spec));
  batch.Place(random, sizes);
  Bytes message(static_cast<size_t>(batch.bytes), 0xEE), expected(message);
  int64_t bad;
  DEMAND(hvdc_encode_batch(batch.tensors.data(), batch.Count(), message.data(), batch.threads,
                           &bad) == HVDC_OK);
  DEMAND(bad == -1);
  for (size_t i = 0; i < batch.tensors.size(); ++i) {
    const Result alone = batch.inputs[i]->Encode(1);
    memcpy(expected.data() + batch.tensors[i].offset, alone.payload.data(), alone.payload.size());
    DEMAND(batch.Next(i) == alone.residual);
    DEMAND(batch.in_place || batch.before[i] == batch.inputs[i]->residual);
  }
  DEMAND(message == expected);

  Bytes both(message);
  both.insert(both.end(), message.begin(), message.end());
  std::vector<Bytes> outs;
  for (size_t i = 0; i < batch.tensors.size(); ++i) {
    outs.emplace_back(batch.inputs[i]->gradient.size());
    batch.tensors[i].values = outs.back().data();
  }
  int32_t rank;
  DEMAND(hvdc_decode_batch(batch.tensors.data(), batch.Count(), both.data(), batch.bytes, 2, 0.5f,
                           batch.threads, &bad, &rank) == HVDC_OK);
  DEMAND(bad == -1 && rank == -1);
  for (size_t i = 0; i < batch.tensors.size(); ++i) {
    const hvdc_tensor& tensor = batch.tensors[i];
    Bytes out(outs[i].size());
    DEMAND(hvdc_decode_sum(&tensor.spec, cases::kStep, both.data() + tensor.offset,
                           tensor.payload_bytes, batch.bytes, 2, 0.5f, out.data(), tensor.dtype, 1,
                           &rank) == HVDC_OK);
    DEMAND(out == outs[i]);
  }
  if (!batch.Count()) return;
  const size_t victim = (*random)() % batch.tensors.size();
  const hvdc_tensor& tensor = batch.tensors[victim];
  const int64_t byte = static_cast<int64_t>((*random)()) & 0x7FFFFFFF;
  uint8_t* const payload = both.data() + batch.bytes + tensor.offset;
  payload[byte % cases::PayloadLength(tensor.spec, payload, tensor.payload_bytes)] ^= 0x10;
  DEMAND(hvdc_decode_batch(batch.tensors.data(), batch.Count(), both.data(), batch.bytes, 2, 0.5f,
                           batch.threads, &bad, &rank) >= HVDC_BAD_HEADER);
  DEMAND(bad == static_cast<int64_t>(victim) && rank == 1);
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? atof(argv[1]) : 10;
  const uint64_t seed = argc > 2 ? strtoull(argv[2], nullptr, 10) : 1;
  long runs = 0;
  for (const char* isa : {"plain", "avx2", "avx512"}) {
    if (hvdc_set_isa(isa) != HVDC_OK) continue;
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds / 3);
    long done[3] = {};
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 3; ++caller) {
      callers.emplace_back([=, &done] {
        Random random(seed * 3 + static_cast<uint64_t>(caller));
        for (; std::chrono::steady_clock::now() < end; ++done[caller]) CheckPayloads(&random);
      });
    }
    for (std::thread& caller : callers) caller.join();
    runs += done[0] + done[1] + done[2];
  }
  printf("%ld batches\n", runs);
  return runs ? 0 : 1;
}
