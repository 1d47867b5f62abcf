// Decoding four neighbouring elements of one payload.
#ifndef HVDC_CUDA_DECODE_QUADS_H_
#define HVDC_CUDA_DECODE_QUADS_H_

#include <type_traits>

#include "codec/stats.h"
#include "codec/trits.h"
#include "cuda/finish.h"
#include "cuda/grid.h"
#include "cuda/quads.h"

namespace hvdc {
namespace HVDC_ARCH {

// Where a quad is, the same in all payloads.
struct QuadPlace {
  __device__ QuadPlace(const Layout& layout, uint32_t at)
      : element(at),
        block(at / static_cast<uint32_t>(layout.block)),
        position(at - block * static_cast<uint32_t>(layout.block)),
        valid(ValidOf(at, static_cast<uint32_t>(layout.count))) {}

  uint32_t element;   // of the tensor
  uint32_t block;     // that it is packed in
  uint32_t position;  // in the block
  uint32_t valid;     // elements that exist; 0 past the tensor's end
};

template <class C>
struct QuadDecoder {
  static constexpr bool kMatrix = std::is_same<C, OneBitMatrixCoder<Thread>>::value;

  // The quad's numbers. Every word of codes, and every scale that belongs to one block, is added to
  // the checksum by exactly one of the quads that read it.
  __device__ static Quad Run(const DecodeJob& job, C coder, const uint8_t* payload,
                             const QuadPlace& place, Totals* totals) {
    float lower[4], upper[4];
    if constexpr (kMatrix) {
      LoadMatrixValues(job.spec, payload, place.element, lower, upper);
      coder.lower = lower;
      coder.upper = upper;
    } else if constexpr (!C::kCast) {
      coder.SetGroup(LoadGroup(job, payload, place, totals));
    }
    uint32_t codes[4];
    LoadCodes(job, payload + BlockOffset(job.layout, place.block), payload, place, codes, totals);
    Quad decoded;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if constexpr (C::kType == CodeType::kBit) {
        decoded.v[k] = coder.Decode(codes[k] != 0, k);
      } else if constexpr (C::kType == CodeType::kByte) {
        const uint8_t byte = static_cast<uint8_t>(codes[k]);
        decoded.v[k] = coder.Decode(C::LoadCodes(&byte), k);
      } else {
        decoded.v[k] = coder.Decode(codes[k], k);
      }
    }
    return decoded;
  }

 private:
  __device__ static GroupScale LoadGroup(const DecodeJob& job, const uint8_t* payload,
                                         const QuadPlace& place, Totals* totals) {
    const float* scales = reinterpret_cast<const float*>(payload + kHeaderBytes);
    const bool own = job.spec.grouping == HVDC_CONTIGUOUS;
    const int64_t group = own ? place.block : 0;
    GroupScale scale = {};
    const auto load = [&](int64_t index) {
      const float value = scales[index];
      if (own && place.position == 0) totals->Word(FloatBits(value), kHeaderBytes + 4 * index);
      return value;
    };
    if constexpr (C::kType == CodeType::kBit) {
      scale.lower = load(group);
      scale.upper = load(job.layout.scales / 2 + group);
    } else {
      scale.sent = load(group);
    }
    return scale;
  }

  __device__ static void LoadCodes(const DecodeJob& job, const uint8_t* packed,
                                   const uint8_t* payload, const QuadPlace& place, uint32_t* codes,
                                   Totals* totals) {
    const auto load = [&](int64_t at, bool mine) {
      const uint32_t word = *reinterpret_cast<const uint32_t*>(packed + at);
      if (mine) totals->Word(word, packed - payload + at);
      return word;
    };
    if constexpr (C::kType == CodeType::kBit || C::kPacking == Packing::kPlanes) {
      const int bits = C::kType == CodeType::kBit ? 1 : EcqBits(job.spec.levels);
      const uint32_t tile = place.position / kTile, within = place.position % kTile;
#pragma unroll
      for (int k = 0; k < 4; ++k) codes[k] = 0;
      for (int bit = 0; bit < bits; ++bit) {
        // Both halves of a plane at once: a tensor's last tile may have no quad in the second.
        const int64_t at = 8 * (static_cast<int64_t>(tile) * bits + bit);
        const uint2 words = *reinterpret_cast<const uint2*>(packed + at);
        if (within == 0) {
          totals->Word(words.x, packed - payload + at);
          totals->Word(words.y, packed - payload + at + 4);
        }
        const uint32_t four = (within < 32 ? words.x : words.y) >> within % 32;
#pragma unroll
        for (int k = 0; k < 4; ++k) codes[k] |= (four >> k & 1u) << bit;
      }
    } else if constexpr (C::kPacking == Packing::kTrits) {
      const int64_t count = BlockElements(job.layout, place.block);
      const uint32_t size = static_cast<uint32_t>(TritBytes(count));
      const uint32_t digit = place.position / size;
      const uint32_t word = load(place.position - digit * size, digit == 0);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        uint16_t value = word >> 8 * k & 0xFFu;
        for (uint32_t i = 0; i < digit; ++i) value = PopTrit(value);
        codes[k] = FirstTrit(value, PopTrit(value));
      }
    } else if constexpr (C::kType == CodeType::kByte) {
      const uint32_t word = load(place.position, true);
#pragma unroll
      for (int k = 0; k < 4; ++k) codes[k] = word >> 8 * k & 0xFFu;
    } else if constexpr (C::kType == CodeType::kHalf) {
      const int64_t at = 2 * static_cast<int64_t>(place.position);
      const uint32_t first = load(at, true), second = load(at + 4, true);
      codes[0] = first & 0xFFFFu;
      codes[1] = first >> 16;
      codes[2] = second & 0xFFFFu;
      codes[3] = second >> 16;
    } else {
      const int64_t at = 4 * static_cast<int64_t>(place.position);
#pragma unroll
      for (int k = 0; k < 4; ++k) codes[k] = load(at + 4 * k, true);
    }
  }
};

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CUDA_DECODE_QUADS_H_
