// Decoding four neighbouring elements of payloads. What does not depend on the payload is worked
// out once for all of them, and kept in registers.
#ifndef HVDC_CUDA_DECODE_QUADS_H_
#define HVDC_CUDA_DECODE_QUADS_H_

#include <type_traits>

#include "codec/int8.h"
#include "codec/onebit.h"
#include "codec/stats.h"
#include "codec/trits.h"
#include "cuda/finish.h"
#include "cuda/grid.h"
#include "cuda/planes.h"
#include "cuda/quads.h"

namespace hvdc {
namespace HVDC_ARCH {

template <class C>
constexpr bool kHasTable = false;
template <class V, class Search>
constexpr bool kHasTable<TableCoder<V, Search>> = true;

// The properties of C's payloads that are known at compile time.
template <class C>
struct Format {
  static constexpr bool kBits = C::kType == CodeType::kBit;
  static constexpr bool kPlanes = kBits || C::kPacking == Packing::kPlanes;
  static constexpr bool kTrits = C::kPacking == Packing::kTrits;
  static constexpr bool kMatrix = std::is_same<C, OneBitMatrixCoder<Thread>>::value;
  static constexpr bool kTable = kHasTable<C>;
  static constexpr bool kScaled = !C::kCast && !kMatrix;  // by the scale of a block, or of all
  static constexpr uint32_t kWords = C::kType == CodeType::kHalf   ? 2
                                     : C::kType == CodeType::kWord ? 4
                                                                   : 1;
  // The distance in a block between the words of a warp's neighbouring rows; 0: it depends.
  static constexpr uint32_t kStep = kBits                             ? kRow / 32
                                    : C::kPacking == Packing::kDirect ? kRow / 4 * kWords
                                                                      : 0;
  // Payloads of which codes are asked for before the first of them is decoded.
  static constexpr int kTogether = kMatrix ? 1 : kWords == 1 ? 4 : 2;
};

// Digits of the four bytes of a word at once: the first ones are taken off by a multiplication and
// a shift, two bytes at a time.
struct DigitPlace {
  __device__ void Set(uint32_t digit) {
    factor = digit == 0 ? 1 : digit == 1 ? 171 : digit == 2 ? 57 : digit == 3 ? 19 : 203;
    shift = digit == 0 ? 0 : digit == 4 ? 14 : 9;
    mask = (0xFFFFu >> shift & 0xFFu) * 0x10001u;
  }

  __device__ uint32_t DigitsOfTwo(uint32_t two) const {
    const uint32_t left = two * factor >> shift & mask;
    const uint32_t rest = left * 171 >> 9 & 0x007F007Fu;  // PopTrit of both
    return left - 3 * rest;
  }

  __device__ uint32_t Digits(uint32_t bytes) const {
    const uint32_t even = DigitsOfTwo(bytes & 0x00FF00FFu);
    return even | DigitsOfTwo(bytes >> 8 & 0x00FF00FFu) << 8;
  }

  uint32_t factor, shift, mask;
};

struct NoPlace {};

// The place of a quad of C's codes, the same in all payloads; kWhole: all four elements exist.
// Threads past the tensor's end, but in its last tile, read planes for their neighbours.
template <class C, bool kWhole>
struct QuadPlace {
  using F = Format<C>;

  __device__ void Set(const DecodeJob& job, uint32_t element) {
    const Blocks& blocks = job.blocks;
    const uint32_t end =
        F::kPlanes ? (blocks.elements + kTile - 1) / kTile * kTile : blocks.elements;
    reads = kWhole || element < end;
    const uint32_t block = reads ? Quotient(blocks.by_size, element) : 0;
    const uint32_t position = element - block * blocks.size;
    bool adds = reads;
    index = CodesOfBlock(blocks, block);
    if constexpr (F::kBits) {
      index += PlaneWord(blocks, position, 0);
      adds = reads && PlaceInHalfTile() == 0;
    } else if constexpr (F::kPlanes) {
      index += PlaneWord(blocks, position, PlaceInHalfTile());
      reads = adds = reads && PlaceInHalfTile() < blocks.planes;
    } else if constexpr (F::kTrits) {
      const uint32_t size = 4 * WordsOfBlock(blocks, block);
      const uint32_t digit = DigitOf(position, size);
      index += (position - digit * size) / 4;
      adds = reads && digit == 0;
      more.Set(digit);
    } else {
      index += position / 4 * F::kWords;
    }
    if constexpr (F::kMatrix) more.Set(job.spec, kWhole || element < blocks.elements ? element : 0);
    weight = adds ? 2 * index + 1 : 0;
    group = IsContiguous(job.spec) ? block : 0;
  }

  uint32_t index;   // of the first word that is read
  uint32_t weight;  // of that word in the checksum; 0 where another thread adds it
  uint32_t group;   // that has its scale
  bool reads;       // whether the thread reads words
  std::conditional_t<F::kTrits, DigitPlace, std::conditional_t<F::kMatrix, MatrixGroups, NoPlace>>
      more;
};

// 1-bit: a group's two values; the others: upper is the scale.
struct Scales {
  float lower, upper;
};

// The numbers that the bytes of 8-bit types with a table stand for, with their signs.
constexpr uint32_t kSignedNumbers = 256;

// Fills them in; called by all threads of a block, which then meet.
template <class C>
__device__ inline const float* SignedNumbers(const C& coder) {
  if constexpr (Format<C>::kTable) {
    __shared__ float numbers[kSignedNumbers];
    for (uint32_t code = threadIdx.x; code < kSignedNumbers; code += kThreads) {
      const float magnitude = coder.magnitudes.values[code & 0x7Fu];
      numbers[code] = BitsFloat(FloatBits(magnitude) | (code & 0x80u) << 24);
    }
    __syncthreads();
    return numbers;
  } else {
    return nullptr;
  }
}

template <class C, bool kWhole>
struct QuadDecoder {
  using F = Format<C>;
  using Place = QuadPlace<C, kWhole>;
  struct Codes {
    uint32_t words[F::kWords];
  };

  __device__ static Codes Read(const uint32_t* from, bool reads) {
    Codes codes = {};
    if (!F::kPlanes && kWhole) reads = true;  // as the compiler may know
    if (!reads) return codes;
    if constexpr (F::kWords == 1) {
      codes.words[0] = *from;
    } else if constexpr (F::kWords == 2) {
      const uint2 pair = *reinterpret_cast<const uint2*>(from);
      memcpy(codes.words, &pair, sizeof(pair));
    } else {
      const uint4 four = *reinterpret_cast<const uint4*>(from);
      memcpy(codes.words, &four, sizeof(four));
    }
    return codes;
  }

  // uppers: of the payload's scales, where the second values begin.
  __device__ static Scales ReadScales(const uint8_t* payload, uint32_t group, uint32_t uppers) {
    Scales scales = {};
    if constexpr (F::kScaled) {
      const float* const from = reinterpret_cast<const float*>(payload + kHeaderBytes);
      if constexpr (F::kBits) scales.lower = from[group];
      scales.upper = from[group + (F::kBits ? uppers : 0)];
    }
    return scales;
  }

  // Every word of codes is added to the checksum by one of the threads that read it.
  __device__ static uint64_t Checksum(const Codes& codes, uint32_t weight) {
    uint64_t sum = static_cast<uint64_t>(codes.words[0]) * weight;
#pragma unroll
    for (uint32_t i = 1; i < F::kWords; ++i) {
      if (kWhole || weight) sum += static_cast<uint64_t>(codes.words[i]) * (weight + 2 * i);
    }
    return sum;
  }

  // The quad's numbers. Called by all threads of a warp, quad by quad in order.
  __device__ static Quad Decode(const C& coder, const float* numbers, const uint8_t* payload,
                                uint32_t uppers, const Place& place, const Codes& codes,
                                const Scales& scales) {
    Quad decoded;
    if constexpr (F::kBits) {
      const uint32_t four = codes.words[0] >> 4 * PlaceInHalfTile();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        Scales own = scales;
        if constexpr (F::kMatrix) {
          const float* const from = reinterpret_cast<const float*>(payload + kHeaderBytes);
          own = {from[place.more.groups[k]], from[uppers + place.more.groups[k]]};
        }
        decoded.v[k] = Thread::Select(four >> k & 1u, own.upper, own.lower);
      }
    } else if constexpr (C::kType == CodeType::kByte) {
      Levels(coder, numbers, place, codes.words[0], decoded.v);
#pragma unroll
      for (int k = 0; k < 4; ++k) decoded.v[k] = Thread::Mul(decoded.v[k], scales.upper);
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint32_t code = C::kType == CodeType::kHalf
                                  ? codes.words[k / 2] >> 16 * (k % 2) & 0xFFFFu
                                  : codes.words[k];
        decoded.v[k] = coder.Decode(code, k);
      }
    }
    return decoded;
  }

 private:
  // Byte k of a word, less an integer below 2^22: as the last bits of 2^23 it is a float already.
  __device__ static float ByteLess(uint32_t bytes, int k, float minus) {
    const uint32_t bits = __byte_perm(bytes, 0x4B000000u, 0x7440u + static_cast<uint32_t>(k));
    return Thread::Sub(BitsFloat(bits), Thread::Add(0x1p23f, minus));
  }

  // The factors of the scale.
  __device__ static void Levels(const C& coder, const float* numbers, const Place& place,
                                uint32_t word, float* levels) {
    uint32_t bytes = word;
    if constexpr (F::kPlanes) bytes = CodesOfPlane(word);
    if constexpr (F::kTrits) bytes = place.more.Digits(word);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if constexpr (F::kTable) {
        levels[k] = numbers[bytes >> 8 * k & 0xFFu];
      } else if constexpr (F::kTrits) {
        // 0, 1, 2 to 0, 1, -1; all of it is exact.
        const float digit = ByteLess(bytes, k, 0.0f);
        levels[k] = Thread::Mul(digit, __fmaf_rn(digit, -1.5f, 2.5f));
      } else if constexpr (F::kPlanes) {
        levels[k] = ByteLess(bytes, k, coder.top);
      } else {
        levels[k] = ByteLess(bytes ^ 0x80808080u, k, 128.0f);  // two's complement
      }
    }
  }
};

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CUDA_DECODE_QUADS_H_
