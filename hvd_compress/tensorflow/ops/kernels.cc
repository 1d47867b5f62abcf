#include "kernels.h"

#include <algorithm>
#include <array>
#include <utility>

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

Table::Table(std::vector<hvdc_cuda_entry> given) : entries(std::move(given)) {
  for (const hvdc_cuda_entry& entry : entries) {
    const size_t number = static_cast<size_t>(entry.array);
    if (arrays.size() <= number) arrays.resize(number + 1);
    Array& array = arrays[number];
    array.count += entry.spec.rows * entry.spec.columns;
    array.used = true;
    array.kept = array.kept || entry.feedback;
    const bool known = entry.spec.rows >= 0;
    payloads.push_back(known ? FunctionsOf(entry.spec).payload_bytes(&entry.spec) : -1);
    const bool refused = bytes < 0 || payloads.back() < 0;
    bytes = refused ? -1 : std::max(bytes, entry.offset + payloads.back());
  }
}

absl::Status Messages::Altered(int64_t entry, int message, int status) const {
  const hvdc_cuda_entry& found = table->entries[static_cast<size_t>(entry)];
  int64_t sender = message;
  if (averages) {
    for (int64_t end = layout->sections[0]; end <= found.offset;) end += layout->sections[++sender];
  }
  const std::string& label = layout->labels[static_cast<size_t>(found.array)];
  const std::string whose =
      absl::StrCat(label, ": expected rank ", sender, averages ? "'s average" : "'s payload");
  switch (status) {
    case HVDC_OK:
      return DataLoss(whose, averages ? ", got none: decoding or " : ", got none: ",
                      "encoding failed there, with an error of its own");
    case HVDC_BAD_HEADER:
      return DataLoss(whose, " to be of the same codec, shape and step, got another header");
    case HVDC_BAD_CHECKSUM:
      return DataLoss(whose, " as it was sent, got another checksum");
    case HVDC_BAD_CODES:
      return DataLoss(whose,
                      " to have codes that an encoder writes, got an impossible length, "
                      "table or index");
    default:
      return Internal(label, ": decoding failed with status ", status);
  }
}

}  // namespace hvd_compress

// Sets the functions of a codec without kernels, by ctypes, before the first graph with it is
// traced. The functions have to live as long as the process.
extern "C" void hvdc_tensorflow_set_reference(uint8_t codec,
                                              const hvd_compress::CodecFunctions* functions) {
  hvd_compress::references[codec] = functions;
}
