#include "kernels.h"

#include <array>

#include "tensorflow/core/platform/errors.h"

namespace hvd_compress {

using tensorflow::errors::DataLoss;
using tensorflow::errors::Internal;

namespace {

constexpr CodecFunctions kNative = {hvdc_payload_bytes, hvdc_encode_batch, hvdc_decode_batch};

// The index is the codec's id, a byte of the payload's header.
std::array<const CodecFunctions*, 256> references = {};

}  // namespace

const CodecFunctions& FunctionsOf(const hvdc_spec& spec) {
  const CodecFunctions* const reference =
      spec.codec < references.size() ? references[spec.codec] : nullptr;
  return reference ? *reference : kNative;
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
  const std::string whose =
      absl::StrCat("rank ", senders.first + copy, senders.owners ? "'s average" : "'s payload");
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

// Sets the functions of a codec without kernels, by ctypes, before the first graph with it is
// traced. The functions have to live as long as the process.
extern "C" void hvdc_tensorflow_set_reference(uint8_t codec,
                                              const hvd_compress::CodecFunctions* functions) {
  hvd_compress::references[codec] = functions;
}
