// Who encodes and decodes with a codec: the native library, or Python, for a codec without kernels.
#ifndef HVD_COMPRESS_TENSORFLOW_OPS_CODEC_FUNCTIONS_H_
#define HVD_COMPRESS_TENSORFLOW_OPS_CODEC_FUNCTIONS_H_

#include "hvdc.h"

namespace hvd_compress {

struct CodecFunctions {
  decltype(&hvdc_payload_bytes) payload_bytes;
  decltype(&hvdc_encode_batch) encode_batch;
  decltype(&hvdc_decode_batch) decode_batch;
};

const CodecFunctions& FunctionsOf(const hvdc_spec& spec);

}  // namespace hvd_compress

#endif  // HVD_COMPRESS_TENSORFLOW_OPS_CODEC_FUNCTIONS_H_
