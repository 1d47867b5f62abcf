#include "codec_functions.h"

namespace hvd_compress {

namespace {

constexpr CodecFunctions kNative = {hvdc_payload_bytes, hvdc_encode_batch, hvdc_decode_batch};

// Until Python has said otherwise: the native library refuses codecs that it does not know.
CodecFunctions reference = kNative;

}  // namespace

const CodecFunctions& FunctionsOf(const hvdc_spec& spec) {
  return spec.codec <= HVDC_FP32 ? kNative : reference;
}

}  // namespace hvd_compress

// For ctypes; before the first graph with such a codec is traced.
extern "C" void hvdc_tensorflow_set_reference(const hvd_compress::CodecFunctions* functions) {
  hvd_compress::reference = *functions;
}
