// Random tensors of every kind of configuration, in vectors of exact size.
#ifndef HVDC_TESTS_NATIVE_INPUTS_H_
#define HVDC_TESTS_NATIVE_INPUTS_H_

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmath>
#include <random>
#include <vector>

#include "cases.h"

namespace inputs {

using Random = std::mt19937_64;
using Bytes = std::vector<uint8_t>;

#define DEMAND(condition)                                             \
  do {                                                                \
    if (!(condition)) {                                               \
      fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      abort();                                                        \
    }                                                                 \
  } while (0)

struct Result {
  Bytes payload, residual;
};

// A tensor to encode, in vectors of exact size.
struct Input {
  cases::Case test;
  Bytes gradient, residual;
  int residual_dtype;
  float alpha, beta;
  bool feedback;

  explicit Input(Random* random) {
    uint8_t bytes[cases::kSpecBytes];
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>((*random)());
    test = cases::MakeCase(bytes);
    const size_t count = static_cast<size_t>(test.spec.rows * test.spec.columns);
    feedback = (*random)() % 2;
    alpha = (*random)() % 2 ? 1.0f : 0.25f;
    beta = (*random)() % 2 ? 1.0f : 0.5f;
    std::normal_distribution<float> normal;
    const float size = std::ldexp(1.0f, static_cast<int>((*random)() % 250) - 125);
    residual_dtype = (*random)() % 2 ? HVDC_DTYPE_FLOAT32 : HVDC_DTYPE_BFLOAT16;
    const size_t width = residual_dtype == HVDC_DTYPE_FLOAT32 ? 4 : 2;
    residual.resize(feedback ? count * width : 0);
    for (size_t i = 0; i < residual.size(); i += width) {
      const float value = size * normal(*random);
      uint8_t bytes[4];
      memcpy(bytes, &value, 4);
      memcpy(residual.data() + i, bytes + 4 - width, width);  // upper half: a bfloat16
    }
    gradient.resize(count * (test.dtype == HVDC_DTYPE_FLOAT32 ? 4 : 2));
    // Mostly numbers of a kind; now and then any bits, which are often not finite.
    if ((*random)() % 4 == 0) {
      for (uint8_t& byte : gradient) byte = static_cast<uint8_t>((*random)());
    } else if (test.dtype == HVDC_DTYPE_FLOAT32) {
      for (size_t i = 0; i < count; ++i) {
        const float value = size * normal(*random);
        memcpy(gradient.data() + 4 * i, &value, 4);
      }
    } else {
      for (size_t i = 0; i < count; ++i) gradient[2 * i + 1] = 0x38 + (*random)() % 8 * 16;
    }
  }

  // The tensor without a place in a message; the residual is not used if there is no feedback.
  hvdc_tensor Tensor(void* before_and_after) const {
    hvdc_tensor tensor = {};
    tensor.spec = test.spec;
    tensor.noise = {7, 1, 42, 0, cases::kStep};
    tensor.values = const_cast<uint8_t*>(gradient.data());
    tensor.dtype = test.dtype;
    tensor.alpha = alpha;
    tensor.beta = beta;
    if (feedback) tensor.residual = tensor.next_residual = before_and_after;
    tensor.residual_dtype = residual_dtype;
    return tensor;
  }

  Result Encode(int threads) const {
    Result result;
    // A byte that the encoder leaves out differs between the two.
    result.payload.assign(static_cast<size_t>(hvdc_payload_bytes(&test.spec)),
                          threads == 1 ? 0xA5 : 0x5A);
    result.residual = residual;
    hvdc_tensor tensor = Tensor(result.residual.data());
    tensor.payload_bytes = static_cast<int64_t>(result.payload.size());
    DEMAND(hvdc_encode_batch(&tensor, 1, result.payload.data(), threads, nullptr) == HVDC_OK);
    return result;
  }
};

}  // namespace inputs

#endif  // HVDC_TESTS_NATIVE_INPUTS_H_
