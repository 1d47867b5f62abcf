#include "coder.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "tensorflow/core/framework/types.h"
#include "tensorflow/core/platform/errors.h"

namespace hvd_compress {

using namespace tensorflow;  // NOLINT: the macros need it

Coder::Coder(OpKernelConstruction* context) {
  std::string spec;
  OP_REQUIRES_OK(context, context->GetAttr("label", &label_));
  OP_REQUIRES_OK(context, context->GetAttr("spec", &spec));
  OP_REQUIRES_OK(context, context->GetAttr("seed", &seed_));
  OP_REQUIRES_OK(context, context->GetAttr("threads", &threads_));
  OP_REQUIRES_OK(context, context->GetAttr("alpha", &alpha_));
  OP_REQUIRES_OK(context, context->GetAttr("beta", &beta_));
  OP_REQUIRES_OK(context, context->GetAttr("begins", &begins_));
  OP_REQUIRES_OK(context, context->GetAttr("lengths", &lengths_));
  OP_REQUIRES_OK(context, context->GetAttr("streams", &streams_));
  OP_REQUIRES_OK(context, context->GetAttr("own", &own_));
  OP_REQUIRES_OK(context, context->GetAttr("own_stream", &own_stream_));
  OP_REQUIRES(context, spec.size() == sizeof(spec_),
              errors::InvalidArgument(label_, ": expected a spec of ", sizeof(spec_),
                                      " bytes, got ", spec.size()));
  std::memcpy(&spec_, spec.data(), sizeof(spec_));
}

absl::Status Coder::CheckTraced(const Tensor& gradient) const {
  const int64_t count = std::accumulate(lengths_.begin(), lengths_.end(), int64_t{0});
  if (lengths_.empty() || gradient.NumElements() == count) return absl::OkStatus();
  return errors::InvalidArgument(label_, ": expected a gradient of ", count,
                                 " elements as when it was first traced, got ",
                                 gradient.NumElements());
}

std::vector<Piece> Coder::Pieces(const TensorShape& shape, int64_t number) const {
  if (lengths_.empty()) return {PieceOf(shape, 0)};
  std::vector<Piece> pieces;
  // Whole rows stay together where each has two values of its own.
  int64_t columns = 1;
  if (spec_.grouping == HVDC_ROW) {
    for (int i = 1; i < shape.dims(); ++i) columns *= shape.dim_size(i);
  }
  const int64_t row = std::max<int64_t>(columns, 1);
  const auto owners = static_cast<int64_t>(lengths_.size());
  for (int64_t owner = 0; owner < owners; ++owner) {
    const int64_t part = (owner + owners - number % owners) % owners;
    pieces.push_back(PieceOf(TensorShape({lengths_[part] / row, row}), begins_[part]));
    if (lengths_[part] == 0) pieces.back().bytes = 0;  // an owner of nothing gets nothing
  }
  return pieces;
}

Piece Coder::PieceOf(const TensorShape& shape, int64_t begin) const {
  Piece piece{spec_, begin, shape.num_elements(), 0, 0};
  piece.spec.rows = shape.dims() ? shape.dim_size(0) : 1;
  piece.spec.columns = 1;
  for (int i = 1; i < shape.dims(); ++i) piece.spec.columns *= shape.dim_size(i);
  piece.bytes = FunctionsOf(piece.spec).payload_bytes(&piece.spec);
  return piece;
}

absl::Status Coder::Encode(OpKernelContext* context, Kernels* kernels,
                           const std::vector<Piece>& pieces, const std::vector<int64_t>& streams,
                           int64_t number, int64_t step, const Tensor& numbers, Tensor* message,
                           Var* residual, Tensor* before) const {
  const auto* from = static_cast<const char*>(numbers.data());
  uint8_t* to = message->flat<uint8_t>().data();
  mutex_lock lock(*residual->mu());
  Tensor next;
  if (feedback()) {
    TF_RETURN_IF_ERROR(Current(context, kernels, numbers.NumElements(), residual, before));
    TF_RETURN_IF_ERROR(context->allocate_temp(before->dtype(), before->shape(), &next));
  }
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    if (piece.bytes == 0) continue;
    const hvdc_noise noise = NoiseOf(streams[i], number, step);
    Feedback feedback = {alpha_, beta_, nullptr, nullptr, DtypeOf(next.dtype())};
    if (this->feedback()) {
      const int64_t first = piece.begin * DataTypeSize(next.dtype());
      feedback.residual = static_cast<const char*>(before->data()) + first;
      feedback.next = static_cast<char*>(next.data()) + first;
    }
    const absl::Status status =
        kernels->Encode(piece.spec, noise, from + piece.begin * DataTypeSize(numbers.dtype()),
                        DtypeOf(numbers.dtype()), feedback.next ? &feedback : nullptr,
                        to + piece.offset, piece.bytes);
    if (!status.ok()) return errors::Internal(label_, ": ", status.message());
  }
  if (feedback()) *residual->tensor() = next;
  return absl::OkStatus();
}

hvdc_noise Coder::NoiseOf(int64_t stream, int64_t number, int64_t step) const {
  return {static_cast<uint32_t>(seed_), static_cast<uint32_t>(stream),
          static_cast<uint32_t>(number), 0, static_cast<uint64_t>(step)};
}

absl::Status Coder::Current(OpKernelContext* context, Kernels* kernels, int64_t count,
                            Var* residual, Tensor* now) const {
  *now = *residual->tensor();
  if (now->NumElements() == count && count != 0) return absl::OkStatus();
  if (now->NumElements() != 0) {
    return errors::InvalidArgument(label_, ": expected a gradient of ", now->NumElements(),
                                   " elements as in the steps before, got ", count,
                                   ": make a compressor for each model");
  }
  const DataType dtype = now->dtype();
  TF_RETURN_IF_ERROR(context->allocate_temp(dtype, TensorShape({count}), now));
  return kernels->Zero(now->data(), count * DataTypeSize(dtype));
}

}  // namespace hvd_compress
