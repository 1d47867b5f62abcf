// One tensor, as a batch of one.
#ifndef HVDC_TESTS_NATIVE_SINGLE_H_
#define HVDC_TESTS_NATIVE_SINGLE_H_

#include "hvdc.h"

// residual: in float32, changed in place; may be null.
inline int hvdc_encode(const hvdc_spec* spec, const hvdc_noise* noise, const void* gradient,
                       int dtype, void* residual, void* payload, int64_t payload_bytes,
                       int threads) {
  hvdc_tensor tensor = {};
  tensor.spec = *spec;
  tensor.noise = *noise;
  tensor.values = const_cast<void*>(gradient);
  tensor.dtype = dtype;
  tensor.payload_bytes = payload_bytes;
  tensor.residual = tensor.next_residual = residual;
  tensor.alpha = 0.5f;
  tensor.beta = 1.0f;
  return hvdc_encode_batch(&tensor, 1, payload, threads, nullptr);
}

inline int hvdc_decode_sum(const hvdc_spec* spec, uint64_t step, const void* payloads,
                           int64_t payload_bytes, int64_t stride, int32_t count, float scale,
                           void* out, int dtype, int threads, int32_t* bad) {
  hvdc_tensor tensor = {};
  tensor.spec = *spec;
  tensor.noise.step = step;
  tensor.values = out;
  tensor.dtype = dtype;
  tensor.payload_bytes = payload_bytes;
  return hvdc_decode_batch(&tensor, 1, payloads, stride, count, scale, threads, nullptr, bad);
}

#endif  // HVDC_TESTS_NATIVE_SINGLE_H_
