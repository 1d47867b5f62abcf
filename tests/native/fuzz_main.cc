// Runs the fuzz target without libFuzzer: on valid payloads that have been altered a little, and on
// noise.
//
//   fuzz_main SECONDS [SEED]
//
// SECONDS are of processor time, so that it does as much on a machine that is busy.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <random>
#include <vector>

#include "cases.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

using Random = std::mt19937_64;
using Bytes = std::vector<uint8_t>;

Bytes Noise(Random* random, size_t size) {
  Bytes bytes(size);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>((*random)());
  return bytes;
}

// Sixteen bytes for the case, and behind them what the encoder writes for it.
Bytes ValidInput(Random* random) {
  Bytes input = Noise(random, cases::kSpecBytes);
  const cases::Case test = cases::MakeCase(input.data());
  const size_t count = static_cast<size_t>(test.spec.rows * test.spec.columns);
  std::vector<float> gradient(count);
  std::normal_distribution<float> normal;
  for (float& value : gradient) value = normal(*random);
  Bytes payload(static_cast<size_t>(hvdc_payload_bytes(&test.spec)));
  const hvdc_noise noise = {1, 2, 3, 0, cases::kStep};
  if (hvdc_encode(&test.spec, &noise, gradient.data(), HVDC_DTYPE_FLOAT32, nullptr, payload.data(),
                  static_cast<int64_t>(payload.size()), test.threads) != HVDC_OK) {
    abort();
  }
  input.insert(input.end(), payload.begin(), payload.end());
  return input;
}

void Mutate(Random* random, Bytes* input) {
  const size_t body = input->size() - cases::kSpecBytes;
  switch ((*random)() % 6) {
    case 0:
      input->resize(cases::kSpecBytes + (*random)() % (body + 1));
      break;
    case 1:
      input->resize(input->size() + (*random)() % 64);
      break;
    case 2:
      break;
    case 3:  // another case for the same payload
      (*input)[(*random)() % cases::kSpecBytes] = static_cast<uint8_t>((*random)());
      break;
    default:
      for (uint64_t changes = 1 + (*random)() % 8; changes && body; --changes) {
        (*input)[cases::kSpecBytes + (*random)() % body] = static_cast<uint8_t>((*random)());
      }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? atof(argv[1]) : 10;
  Random random(argc > 2 ? strtoull(argv[2], nullptr, 10) : 1);
  const clock_t end = clock() + static_cast<clock_t>(seconds * CLOCKS_PER_SEC);
  long runs = 0;
  while (clock() < end) {
    Bytes input =
        random() % 4 ? ValidInput(&random) : Noise(&random, cases::kSpecBytes + random() % 5000);
    Mutate(&random, &input);
    LLVMFuzzerTestOneInput(input.data(), input.size());
    ++runs;
  }
  printf("%ld inputs\n", runs);
  return 0;
}
