// Decoding four neighbouring elements of one payload.
#ifndef HVDC_CUDA_DECODE_QUADS_H_
#define HVDC_CUDA_DECODE_QUADS_H_

#include <type_traits>

#include "codec/stats.h"
#include "codec/trits.h"
#include "cuda/finish.h"
#include "cuda/grid.h"
#include "cuda/planes.h"
#include "cuda/quads.h"

namespace hvdc {
namespace HVDC_ARCH {

// What a thread reads of a payload for one quad of codes.
struct Codes {
  uint32_t words[4];
  float lower, upper;  // 1-bit: the block's values; the others: upper is the scale
};

// Where a quad of C's codes is, the same in all payloads; kWhole: all four elements exist. Threads
// past the tensor's end, but in its last tile, read planes for their neighbours.
template <class C, bool kWhole>
struct QuadPlace {
  static constexpr bool kBits = C::kType == CodeType::kBit;
  static constexpr bool kPlanes = kBits || C::kPacking == Packing::kPlanes;
  static constexpr uint32_t kWords = C::kType == CodeType::kHalf   ? 2
                                     : C::kType == CodeType::kWord ? 4
                                                                   : 1;

  __device__ QuadPlace(const Blocks& blocks, uint32_t at) : element(at) {
    const uint32_t end = kPlanes ? (blocks.elements + kTile - 1) / kTile * kTile : blocks.elements;
    reads = kWhole || at < end;
    block = reads ? Quotient(blocks.by_size, at) : 0;
    const uint32_t position = at - block * blocks.size;
    adds = reads;
    index = CodesOfBlock(blocks, block);
    if constexpr (kBits) {
      index += PlaneWord(blocks, position, 0);
      adds = reads && PlaceInHalfTile() == 0;
    } else if constexpr (kPlanes) {
      index += PlaneWord(blocks, position, PlaceInHalfTile());
      reads = adds = reads && PlaceInHalfTile() < blocks.planes;
    } else if constexpr (C::kPacking == Packing::kTrits) {
      const uint32_t size = 4 * WordsOfBlock(blocks, block);
      digit = DigitOf(position, size);
      index += (position - digit * size) / 4;
      adds = reads && digit == 0;
    } else {
      index += position / 4 * kWords;
    }
  }

  uint32_t element;  // of the tensor
  uint32_t block;    // that it is packed in
  uint32_t index;    // of the first word that is read
  uint32_t digit;    // trits: of the words' bytes
  bool reads, adds;  // whether the thread reads words, and adds them to the checksum
};

template <class C, bool kWhole>
struct QuadDecoder {
  using Place = QuadPlace<C, kWhole>;
  static constexpr bool kMatrix = std::is_same<C, OneBitMatrixCoder<Thread>>::value;

  // Of one of the payloads.
  __device__ static Codes Read(const DecodeJob& job, int32_t rank, const Place& place) {
    const uint8_t* const payload = job.payloads + rank * job.stride;
    Codes codes = {};
    if (place.reads) {
      ReadWords(reinterpret_cast<const uint32_t*>(payload) + place.index, codes.words);
    }
    if constexpr (!C::kCast && !kMatrix) {
      const float* const scales = reinterpret_cast<const float*>(payload + kHeaderBytes);
      const uint32_t group = IsContiguous(job.spec) ? place.block : 0;
      if constexpr (Place::kBits) codes.lower = scales[group];
      codes.upper = scales[group + (Place::kBits ? job.layout.scales / 2 : 0)];
    }
    return codes;
  }

  // Every word of codes is added to the checksum by one of the threads that read it.
  __device__ static void Count(const Place& place, const Codes& codes, Totals* totals) {
    if (!place.adds) return;
#pragma unroll
    for (uint32_t i = 0; i < Place::kWords; ++i) totals->Word(codes.words[i], place.index + i);
  }

  // The quad's numbers. Called by all threads of a warp, quad by quad in order.
  __device__ static Quad Decode(const DecodeJob& job, C coder, const uint8_t* payload,
                                const Place& place, const Codes& read) {
    float lower[4], upper[4];
    if constexpr (kMatrix) {
      const uint32_t element = kWhole || place.element < job.blocks.elements ? place.element : 0;
      LoadMatrixValues(job.spec, payload, element, lower, upper);
      coder.lower = lower;
      coder.upper = upper;
    } else if constexpr (!C::kCast) {
      GroupScale scale = {};
      scale.lower = read.lower;
      scale.upper = scale.sent = read.upper;
      coder.SetGroup(scale);
    }
    uint32_t codes[4];
    Unpack(place, read.words, codes);
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
  __device__ static void ReadWords(const uint32_t* from, uint32_t* words) {
    if constexpr (Place::kWords == 1) {
      words[0] = *from;
    } else if constexpr (Place::kWords == 2) {
      const uint2 pair = *reinterpret_cast<const uint2*>(from);
      memcpy(words, &pair, sizeof(pair));
    } else {
      const uint4 four = *reinterpret_cast<const uint4*>(from);
      memcpy(words, &four, sizeof(four));
    }
  }

  __device__ static void Unpack(const Place& place, const uint32_t* words, uint32_t* codes) {
    if constexpr (C::kType == CodeType::kBit) {
      const uint32_t four = words[0] >> 4 * PlaceInHalfTile();
#pragma unroll
      for (int k = 0; k < 4; ++k) codes[k] = four >> k & 1u;
    } else if constexpr (C::kType == CodeType::kByte) {
      const uint32_t bytes = Place::kPlanes ? CodesOfPlane(words[0]) : words[0];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        codes[k] = bytes >> 8 * k & 0xFFu;
        if constexpr (C::kPacking == Packing::kTrits) {
          const uint16_t rest = PopTrits(static_cast<uint16_t>(codes[k]), place.digit);
          codes[k] = FirstTrit(rest, PopTrit(rest));
        }
      }
    } else if constexpr (C::kType == CodeType::kHalf) {
#pragma unroll
      for (int k = 0; k < 4; ++k) codes[k] = words[k / 2] >> 16 * (k % 2) & 0xFFFFu;
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k) codes[k] = words[k];
    }
  }
};

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CUDA_DECODE_QUADS_H_
