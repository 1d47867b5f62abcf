// Encodes random tensors with every kind of configuration, to be run under sanitizers: any number
// of threads, several callers at once, and a forked child give the bytes that one thread gives.
//
//   encode_main SECONDS [SEED [nofork]]
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <random>
#include <thread>
#include <vector>

#include "inputs.h"

namespace {

using inputs::Bytes;
using inputs::Input;
using inputs::Random;
using inputs::Result;

void DemandSame(const Result& a, const Result& b) {
  DEMAND(a.payload == b.payload);
  DEMAND(a.residual == b.residual);
}

// One tensor, there and back, with one thread and with several.
void CheckOne(Random* random) {
  const Input input(random);
  const Result alone = input.Encode(1);
  const uint8_t* const payload = alone.payload.data();
  const int64_t size = static_cast<int64_t>(alone.payload.size());
  const int64_t length = cases::PayloadLength(input.test.spec, payload, size);
  DEMAND(length >= 32 && length <= size);
  DEMAND(cases::SlowChecksum(payload, length) == [&] {
    uint64_t sum;
    memcpy(&sum, alone.payload.data() + 24, 8);
    return sum;
  }());
  Result together = input.Encode(input.test.threads);
  DemandSame(alone, together);
  Bytes out(input.gradient.size());
  int32_t bad;
  DEMAND(hvdc_decode_sum(&input.test.spec, cases::kStep, alone.payload.data(), size, size, 1, 1.0f,
                         out.data(), input.test.dtype, input.test.threads, &bad) == HVDC_OK);
}

// A child of a process whose pool has worked has no threads of it, but gets its own.
void CheckFork(uint64_t seed) {
  Random random(seed);
  std::vector<float> gradient(300000);
  std::normal_distribution<float> normal;
  for (float& value : gradient) value = normal(random);
  hvdc_spec spec = {};
  spec.codec = HVDC_ONEBIT;
  spec.group = 1024;
  spec.rows = static_cast<int64_t>(gradient.size());
  spec.columns = 1;
  const hvdc_noise noise = {};
  Bytes expected(static_cast<size_t>(hvdc_payload_bytes(&spec))), payload(expected.size());
  const int64_t size = static_cast<int64_t>(expected.size());
  DEMAND(hvdc_encode(&spec, &noise, gradient.data(), 0, nullptr, expected.data(), size, 4) == 0);
  const pid_t child = fork();
  DEMAND(child >= 0);
  if (child == 0) {
    alarm(120);
    for (int i = 0; i < 20; ++i) {
      memset(payload.data(), 0, payload.size());
      DEMAND(hvdc_encode(&spec, &noise, gradient.data(), 0, nullptr, payload.data(), size, 4) == 0);
      DEMAND(payload == expected);
    }
    _exit(0);
  }
  int status;
  DEMAND(waitpid(child, &status, 0) == child);
  DEMAND(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? atof(argv[1]) : 10;
  const uint64_t seed = argc > 2 ? strtoull(argv[2], nullptr, 10) : 1;
  const bool forks = argc <= 3;
  long runs = 0;
  for (const char* isa : {"plain", "avx2", "avx512"}) {
    if (hvdc_set_isa(isa) != HVDC_OK) continue;
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds / 3);
    long done[3] = {};
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 3; ++caller) {
      callers.emplace_back([=, &done] {
        Random random(seed * 3 + static_cast<uint64_t>(caller));
        for (; std::chrono::steady_clock::now() < end; ++done[caller]) CheckOne(&random);
      });
    }
    for (std::thread& caller : callers) caller.join();
    // The callers are no longer at work: they may have locked AddressSanitizer's own allocator.
    if (forks) CheckFork(seed);
    runs += done[0] + done[1] + done[2];
  }
  printf("%ld tensors\n", runs);
  return runs ? 0 : 1;
}
