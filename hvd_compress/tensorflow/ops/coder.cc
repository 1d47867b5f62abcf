#include "coder.h"

#include <utility>

#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/platform/errors.h"

namespace hvd_compress {

using namespace tensorflow;  // NOLINT: the macros need it

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

absl::Status Coder::Encode(OpKernelContext* context, Kernels* kernels,
                           const std::vector<Piece>& pieces, const std::vector<int64_t>& streams,
                           int64_t seed, int64_t step, const Tensor& numbers, Tensor* message,
                           Var* residual) const {
  const auto* from = static_cast<const char*>(numbers.data());
  uint8_t* to = message->flat<uint8_t>().data();
  mutex_lock lock(*residual->mu());
  float* rest;
  TF_RETURN_IF_ERROR(Prepare(context, kernels, numbers.NumElements(), residual, &rest));
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    if (piece.bytes == 0) continue;
    const hvdc_noise noise = NoiseOf(seed, streams[i], step);
    const hvdc_feedback feedback = FeedbackWith(rest ? rest + piece.begin : nullptr);
    const absl::Status status = kernels->Encode(
        piece.spec, noise, from + piece.begin * DataTypeSize(numbers.dtype()),
        DtypeOf(numbers.dtype()), rest ? &feedback : nullptr, to + piece.offset, piece.bytes);
    if (!status.ok()) return errors::Internal(label(), ": ", status.message());
  }
  return absl::OkStatus();
}

TakeBack Coder::ToTakeBack(std::shared_ptr<Kernels> kernels, std::vector<Piece> pieces,
                           int64_t step, const Tensor& numbers, const Tensor& message,
                           core::RefCountPtr<Var> residual) const {
  return [coder = *this, kernels = std::move(kernels), pieces = std::move(pieces), step, numbers,
          message, residual = std::move(residual)](When when) {
    mutex_lock lock(*residual->mu());
    const auto* from = static_cast<const char*>(numbers.data());
    const auto* payloads = message.flat<uint8_t>().data();
    float* rest = residual->tensor()->flat<float>().data();
    for (size_t i = 0; i < pieces.size(); ++i) {
      const Piece& piece = pieces[i];
      if (piece.bytes == 0) continue;
      const Payloads payload{piece.spec, step, payloads + piece.offset, piece.bytes, 1};
      TF_RETURN_IF_ERROR(kernels->TakeBack(payload, {coder.label(), i, pieces.size(), false, step},
                                           from + piece.begin * DataTypeSize(numbers.dtype()),
                                           DtypeOf(numbers.dtype()),
                                           coder.FeedbackWith(rest + piece.begin), when));
    }
    return absl::OkStatus();
  };
}

absl::Status Coder::Decode(Kernels* kernels, const std::vector<Piece>& pieces, Source source,
                           int copies, float scale, int64_t step, const Tensor& message,
                           Tensor* sum, bool* nonfinite) const {
  const int64_t bytes = MessageBytes(pieces, copies);
  if (message.NumElements() != bytes) {
    return errors::DataLoss(label(), ": expected a message of ", bytes, " bytes, got ",
                            message.NumElements());
  }
  auto* to = static_cast<char*>(sum->data());
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    if (piece.bytes == 0) continue;
    const Payloads payloads{piece.spec, step,
                            message.flat<uint8_t>().data() + piece.offset * copies, piece.bytes,
                            copies};
    TF_RETURN_IF_ERROR(kernels->DecodeSum(
        payloads, {label(), i, pieces.size(), source == Source::kOwners, step}, scale,
        to + piece.begin * DataTypeSize(sum->dtype()), DtypeOf(sum->dtype()), nonfinite));
  }
  return absl::OkStatus();
}

int64_t MessageBytes(const std::vector<Piece>& pieces, int copies) {
  return pieces.empty() ? 0 : (pieces.back().offset + pieces.back().bytes) * copies;
}

}  // namespace hvd_compress
