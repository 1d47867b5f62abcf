// Encoding four neighbouring elements: quantized, the residual updated, the codes packed together
// with those of other threads.
#ifndef HVDC_CUDA_ENCODE_QUADS_H_
#define HVDC_CUDA_ENCODE_QUADS_H_

#include <type_traits>

#include "codec/philox.h"
#include "codec/stats.h"
#include "codec/trits.h"
#include "cuda/grid.h"
#include "cuda/quads.h"

namespace hvdc {
namespace HVDC_ARCH {

// What is encoded, and what the residual becomes before the decoded number is subtracted.
struct Compensated {
  Quad x, kept;
};

__device__ inline Compensated CompensateQuad(const EncodeJob& job, const Quad& g, const Quad& h) {
  Compensated both;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    both.x.v[k] = g.v[k];
    if (job.mode != Mode::kNone) both.x.v[k] = Compensate<Thread>(g.v[k], h.v[k], job.alpha);
    both.kept.v[k] = both.x.v[k];
    if (job.mode == Mode::kGeneral) {
      both.kept.v[k] = Compensate<Thread>(g.v[k], h.v[k], job.beta);
    }
  }
  return both;
}

// Where the elements of a block come from: straight from gradient and residual, or from the shared
// memory in which a warp holds them.
struct FromTensor {
  __device__ Compensated Load(const EncodeJob& job, uint32_t position, uint32_t valid) const {
    const uint32_t at = start + position;
    const Quad g = LoadQuad(job.dtype, job.gradient, at, valid, job.aligned);
    Quad h = {};
    if (job.mode != Mode::kNone) {
      h = LoadQuadAs<HVDC_DTYPE_FLOAT32>(job.residual, at, valid, job.aligned);
    }
    return CompensateQuad(job, g, h);
  }

  uint32_t start;  // of the block
};

struct FromShared {
  __device__ Compensated Load(const EncodeJob&, uint32_t position, uint32_t) const {
    Compensated both;
    both.x = *reinterpret_cast<const Quad*>(x + position);
    both.kept = *reinterpret_cast<const Quad*>(kept + position);
    return both;
  }

  const float* x;
  const float* kept;  // the same as x where the mode is not general
  uint32_t start;
};

// The noise of four neighbours, which share the place in their counters' blocks.
__device__ inline Quad NoiseOf(const NoiseState& noise, uint32_t element) {
  const uint32_t tile = element / kTile, place = element % kTile;
  Quad uniform;
#pragma unroll
  for (uint32_t k = 0; k < 4; ++k) {
    uint32_t words[4];
    PhiloxWords<Thread>(noise, kLanes * tile + place % kLanes + k, words);
    const uint32_t low = place & kLanes ? words[1] : words[0];
    const uint32_t high = place & kLanes ? words[3] : words[2];
    uniform.v[k] = Uniform<Thread>(place & 2 * kLanes ? high : low);
  }
  return uniform;
}

// A block of elements that are packed together, and where they are.
template <class Source>
struct Block {
  Source source;
  int64_t codes;   // byte of the payload where its codes start
  uint32_t count;  // elements
};

template <class C>
struct QuadEncoder {
  // Codes of the block's elements from position on; past its end they are 0.
  template <class Source>
  __device__ static void Quantize(const EncodeJob& job, const C& coder, const GroupScale& scale,
                                  const Block<Source>& block, uint32_t position, uint32_t* codes,
                                  Totals* totals) {
    const uint32_t valid = ValidOf(position, block.count);
#pragma unroll
    for (int k = 0; k < 4; ++k) codes[k] = 0;
    if (!valid) return;
    if (!scale.finite) {
      totals->nonfinite = true;
      if constexpr (C::kType == CodeType::kByte) {
#pragma unroll
        for (uint32_t k = 0; k < 4; ++k) {
          if (k < valid) codes[k] = coder.BlankCode();
        }
      }
      return;
    }
    const Compensated both = block.source.Load(job, position, valid);
    const uint32_t element = block.source.start + position;
    Quad uniform = {};
    if constexpr (C::kNoise) uniform = NoiseOf(job.noise, element);
    Quad after;
    bool finite = true;
#pragma unroll
    for (uint32_t k = 0; k < 4; ++k) {
      const float x = scale.kept ? both.x.v[k] : 0.0f;
      const auto code = coder.Code(x, uniform.v[k]);
      const float decoded = coder.Decode(code, k);
      after.v[k] = Thread::Sub(both.kept.v[k], decoded);
      if (k < valid) {
        codes[k] = code;
        finite = finite && IsFinite<Thread>(decoded);
      }
    }
    if constexpr (C::kCast) {
      if (!finite) {
        // Rare: element by element, so that those that decode to no finite number keep theirs.
        totals->nonfinite = true;
        if (job.mode == Mode::kNone) return;
#pragma unroll
        for (uint32_t k = 0; k < 4; ++k) {
          const float decoded = coder.Decode(static_cast<CodeOf>(codes[k]), k);
          if (k < valid && IsFinite<Thread>(decoded)) job.residual[element + k] = after.v[k];
        }
        return;
      }
    }
    if (job.mode == Mode::kNone) return;
    StoreQuadAs<HVDC_DTYPE_FLOAT32>(job.residual, element, valid, job.aligned, after);
  }

  // Direct codes of a quad, as whole words; behind the last element stands padding.
  template <class Source>
  __device__ static void StoreDirect(const EncodeJob& job, const Block<Source>& block,
                                     uint32_t position, const uint32_t* codes, Totals* totals) {
    if (position >= block.count) return;
    if constexpr (C::kType == CodeType::kByte) {
      const int64_t at = block.codes + position;
      const uint32_t word =
          (codes[0] & 0xFFu) | (codes[1] & 0xFFu) << 8 | (codes[2] & 0xFFu) << 16 | codes[3] << 24;
      *reinterpret_cast<uint32_t*>(job.payload + at) = word;
      totals->Word(word, at);
    }
    if constexpr (C::kType == CodeType::kHalf) {
      const int64_t at = block.codes + 2 * static_cast<int64_t>(position);
      const uint2 words = make_uint2(codes[0] | codes[1] << 16, codes[2] | codes[3] << 16);
      *reinterpret_cast<uint2*>(job.payload + at) = words;
      totals->Word(words.x, at);
      totals->Word(words.y, at + 4);
    }
    if constexpr (C::kType == CodeType::kWord) {
      const int64_t at = block.codes + 4 * static_cast<int64_t>(position);
      *reinterpret_cast<uint4*>(job.payload + at) =
          make_uint4(codes[0], codes[1], codes[2], codes[3]);
#pragma unroll
      for (int k = 0; k < 4; ++k) totals->Word(codes[k], at + 4 * k);
    }
  }

  // Bit planes: eight threads make the words of half a tile together, and each stores one of them.
  // Called by all threads of a warp, quad by quad in order.
  template <class Source>
  __device__ static void StorePlanes(const EncodeJob& job, const Block<Source>& block,
                                     uint32_t position, const uint32_t* codes, Totals* totals) {
    const uint32_t place = threadIdx.x % 8;
    const int bits = C::kType == CodeType::kBit ? 1 : EcqBits(job.spec.levels);
    uint32_t mine = 0;
    for (int bit = 0; bit < bits; ++bit) {
      uint32_t word = 0;
#pragma unroll
      for (int k = 0; k < 4; ++k) word |= (codes[k] >> bit & 1u) << k;
      word <<= 4 * place;
      word |= __shfl_xor_sync(kFullWarp, word, 1, 8);
      word |= __shfl_xor_sync(kFullWarp, word, 2, 8);
      word |= __shfl_xor_sync(kFullWarp, word, 4, 8);
      if (place == static_cast<uint32_t>(bit)) mine = word;
    }
    const uint32_t tile = position / kTile;
    if (place >= static_cast<uint32_t>(bits) || tile * kTile >= block.count) return;
    const int64_t at =
        block.codes + 8 * (static_cast<int64_t>(tile) * bits + place) + position % kTile / 32 * 4;
    *reinterpret_cast<uint32_t*>(job.payload + at) = mine;
    totals->Word(mine, at);
  }

  // One word of a block's trits, which holds five quads that stand far apart.
  template <class Source>
  __device__ static void Trits(const EncodeJob& job, const C& coder, const GroupScale& scale,
                               const Block<Source>& block, uint32_t word, Totals* totals) {
    const uint32_t size = static_cast<uint32_t>(TritBytes(block.count));
    uint8_t values[4] = {};
#pragma unroll 1
    for (int digit = 4; digit >= 0; --digit) {
      uint32_t codes[4];
      const uint32_t position = static_cast<uint32_t>(digit) * size + 4 * word;
      Quantize(job, coder, scale, block, position, codes, totals);
#pragma unroll
      for (int k = 0; k < 4; ++k) values[k] = PushTrit(values[k], static_cast<uint8_t>(codes[k]));
    }
    uint32_t packed;
    memcpy(&packed, values, sizeof(packed));
    const int64_t at = block.codes + 4 * static_cast<int64_t>(word);
    *reinterpret_cast<uint32_t*>(job.payload + at) = packed;
    totals->Word(packed, at);
  }

  // Encodes and stores a quad; called by all threads of a warp where codes go into bit planes.
  template <class Source>
  __device__ static void Run(const EncodeJob& job, const C& coder, const GroupScale& scale,
                             const Block<Source>& block, uint32_t position, Totals* totals) {
    uint32_t codes[4];
    Quantize(job, coder, scale, block, position, codes, totals);
    if constexpr (C::kType == CodeType::kBit || C::kPacking == Packing::kPlanes) {
      StorePlanes(job, block, position, codes, totals);
    } else {
      StoreDirect(job, block, position, codes, totals);
    }
  }

 private:
  using CodeOf = std::conditional_t<C::kType == CodeType::kBit, bool, uint32_t>;
};

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CUDA_ENCODE_QUADS_H_
