#include "kernels.h"

#include "tensorflow/core/platform/errors.h"

namespace hvd_compress {

using tensorflow::errors::DataLoss;
using tensorflow::errors::Internal;

namespace {

constexpr CodecFunctions kNative = {hvdc_payload_bytes, hvdc_encode_batch, hvdc_decode_batch};

// Until Python has said otherwise: the native library refuses codecs that it does not know.
CodecFunctions reference = kNative;

}  // namespace

const CodecFunctions& FunctionsOf(const hvdc_spec& spec) {
  return spec.codec <= HVDC_FP32 ? kNative : reference;
}

int DtypeOf(tensorflow::DataType type) {
  switch (type) {
    case tensorflow::DT_HALF:
      return HVDC_DTYPE_FLOAT16;
    case tensorflow::DT_BFLOAT16:
      return HVDC_DTYPE_BFLOAT16;
    default:
      return HVDC_DTYPE_FLOAT32;
  }
}

absl::Status BadPayload(const Senders& senders, int status, int copy) {
  const std::string whose = absl::StrCat("rank ", copy * senders.pieces + senders.piece,
                                         senders.owners ? "'s average" : "'s payload");
  switch (status) {
    case HVDC_BAD_HEADER:
      return DataLoss(senders.label, ": expected ", whose,
                      " to be of the same codec, shape and step ", senders.step,
                      ", got another header");
    case HVDC_BAD_CHECKSUM:
      return DataLoss(senders.label, ": expected ", whose, " as it was sent, got another checksum");
    case HVDC_BAD_CODES:
      return DataLoss(senders.label, ": expected ", whose,
                      " to have codes that an encoder writes, got an impossible length, table or "
                      "index");
    default:
      return Internal(senders.label, ": decoding failed with status ", status);
  }
}

}  // namespace hvd_compress

// For ctypes; before the first graph with such a codec is traced.
extern "C" void hvdc_tensorflow_set_reference(const hvd_compress::CodecFunctions* functions) {
  hvd_compress::reference = *functions;
}
