#include "coder.h"

#include <cstring>
#include <utility>

#include "codec/layout.h"
#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/platform/errors.h"

namespace hvd_compress {

using namespace tensorflow;  // NOLINT: the macros need it

namespace {

// Whether zeros came in a payload's place, as in hvd_compress/exchange/shards.py.
bool IsFailure(const uint8_t* payload) {
  const hvdc::Header none{};
  return std::memcmp(payload, &none, sizeof(none)) == 0;
}

bool IsNonfinite(const uint8_t* payload) {
  hvdc::Header header;
  std::memcpy(&header, payload, sizeof(header));
  return header.flags & hvdc::kFlagNonfinite;
}

}  // namespace

Piece Coder::Whole(const TensorShape& shape) const {
  Piece piece{SpecOf(shape), 0, 0, 0};
  piece.bytes = hvdc_payload_bytes(&piece.spec);
  return piece;
}

std::vector<Piece> Coder::Parts(const std::vector<int64_t>& begins,
                                const std::vector<int64_t>& lengths) const {
  std::vector<Piece> pieces;
  int64_t offset = 0;
  for (size_t i = 0; i < lengths.size(); ++i) {
    Piece piece = Whole(TensorShape({lengths[i]}));
    piece.begin = begins[i];
    piece.offset = offset;
    if (lengths[i] == 0) piece.bytes = 0;  // who owns nothing gets nothing
    offset += piece.bytes;
    pieces.push_back(piece);
  }
  return pieces;
}

absl::Status Coder::Encode(OpKernelContext* context, const std::vector<Piece>& pieces,
                           const std::vector<int64_t>& streams, int64_t seed, int64_t step,
                           const Tensor& numbers, Tensor* message, Var* residual) const {
  const auto* from = static_cast<const char*>(numbers.data());
  uint8_t* to = message->flat<uint8_t>().data();
  mutex_lock lock(*residual->mu());
  float* rest;
  TF_RETURN_IF_ERROR(Prepare(context, numbers.NumElements(), residual, &rest));
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    if (piece.bytes == 0) continue;
    const hvdc_noise noise = NoiseOf(seed, streams[i], step);
    const hvdc_feedback feedback = FeedbackWith(rest ? rest + piece.begin : nullptr);
    const int status =
        hvdc_encode(&piece.spec, &noise, from + piece.begin * DataTypeSize(numbers.dtype()),
                    DtypeOf(numbers.dtype()), rest ? &feedback : nullptr, to + piece.offset,
                    piece.bytes, threads());
    if (status != HVDC_OK) {
      return errors::Internal(label(), ": encoding failed with status ", status);
    }
  }
  return absl::OkStatus();
}

TakeBack Coder::ToTakeBack(std::vector<Piece> pieces, int64_t step, const Tensor& numbers,
                           const Tensor& message, core::RefCountPtr<Var> residual) const {
  return [coder = *this, pieces = std::move(pieces), step, numbers, message,
          residual = std::move(residual)] {
    mutex_lock lock(*residual->mu());
    const auto* from = static_cast<const char*>(numbers.data());
    const auto* payloads = message.flat<uint8_t>().data();
    float* rest = residual->tensor()->flat<float>().data();
    for (const Piece& piece : pieces) {
      if (piece.bytes == 0) continue;
      const hvdc_feedback feedback = coder.FeedbackWith(rest + piece.begin);
      const int status =
          hvdc_take_back(&piece.spec, step, from + piece.begin * DataTypeSize(numbers.dtype()),
                         DtypeOf(numbers.dtype()), &feedback, payloads + piece.offset, piece.bytes,
                         coder.threads());
      if (status != HVDC_OK) {
        return errors::Internal(coder.label(), ": taking a residual back failed with status ",
                                status);
      }
    }
    return absl::OkStatus();
  };
}

absl::Status Coder::Decode(const std::vector<Piece>& pieces, Source source, int copies, float scale,
                           int64_t step, const Tensor& message, Tensor* sum,
                           bool* nonfinite) const {
  const int64_t bytes = MessageBytes(pieces, copies);
  if (message.NumElements() != bytes) {
    return errors::DataLoss(label(), ": expected a message of ", bytes, " bytes, got ",
                            message.NumElements());
  }
  const bool owners = source == Source::kOwners;
  const auto whose = [owners, &pieces](size_t piece, int copy) {
    return absl::StrCat("rank ", copy * pieces.size() + piece,
                        owners ? "'s average" : "'s payload");
  };
  auto* to = static_cast<char*>(sum->data());
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    if (piece.bytes == 0) continue;
    const uint8_t* payloads = message.flat<uint8_t>().data() + piece.offset * copies;
    for (int copy = 0; copy < copies; ++copy) {
      if (IsFailure(payloads + copy * piece.bytes)) {
        return errors::DataLoss(label(), ": expected ", whose(i, copy),
                                ", got none: ", owners ? "decoding or " : "",
                                "encoding failed there, with an error of its own");
      }
    }
    int32_t bad = -1;
    const int status = hvdc_decode_sum(&piece.spec, step, payloads, piece.bytes, piece.bytes,
                                       copies, scale, to + piece.begin * DataTypeSize(sum->dtype()),
                                       DtypeOf(sum->dtype()), 0, threads(), &bad);
    if (status != HVDC_OK) return Failure(status, whose(i, bad), step);
    for (int copy = 0; copy < copies; ++copy) {
      *nonfinite = *nonfinite || IsNonfinite(payloads + copy * piece.bytes);
    }
  }
  return absl::OkStatus();
}

absl::Status Coder::Failure(int status, const std::string& whose, int64_t step) const {
  switch (status) {
    case HVDC_BAD_HEADER:
      return errors::DataLoss(label(), ": expected ", whose,
                              " to be of the same codec, shape and step ", step,
                              ", got another header");
    case HVDC_BAD_CHECKSUM:
      return errors::DataLoss(label(), ": expected ", whose,
                              " as it was sent, got another checksum");
    default:
      return errors::Internal(label(), ": decoding failed with status ", status);
  }
}

int64_t MessageBytes(const std::vector<Piece>& pieces, int copies) {
  return pieces.empty() ? 0 : (pieces.back().offset + pieces.back().bytes) * copies;
}

}  // namespace hvd_compress
