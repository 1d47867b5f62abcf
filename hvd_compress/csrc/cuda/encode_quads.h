// Encoding four neighbouring elements: quantized, the residual updated, the codes packed together
// with those of other threads.
#ifndef HVDC_CUDA_ENCODE_QUADS_H_
#define HVDC_CUDA_ENCODE_QUADS_H_

#include <type_traits>

#include "codec/philox.h"
#include "codec/rounding.h"
#include "codec/stats.h"
#include "codec/trits.h"
#include "cuda/grid.h"
#include "cuda/planes.h"
#include "cuda/quads.h"

namespace hvdc {
namespace HVDC_ARCH {

// The noise of four neighbouring elements. A counter has numbers for four elements of a tile, which
// stand sixteen apart: where the four threads that have those are in one warp, each computes one
// counter, and they exchange numbers; elsewhere a thread computes four, and uses a number of each.
//
// Word q of the thread in quarter k for word k of the thread in quarter q; a tile's quarters are
// four threads each.
__device__ inline void TransposeQuarters(uint32_t* words) {
#pragma unroll
  for (uint32_t step = 2; step; step /= 2) {
    const bool second = threadIdx.x & 4 * step;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      if (i & step) continue;
      const uint32_t given = second ? words[i] : words[i + step];
      const uint32_t got = __shfl_xor_sync(kFullWarp, given, static_cast<int>(4 * step), kWarpSize);
      words[i] = second ? got : words[i];
      words[i + step] = second ? words[i + step] : got;
    }
  }
}

// The numbers that round codes: those of the tile's four quarters that a lane's counter has.
struct OfCodes {
  __device__ static void Draw(const NoiseState& noise, uint32_t element, uint32_t lane,
                              uint32_t* numbers) {
    PhiloxWords<Thread>(noise, kLanes * (element / kTile) + lane, numbers);
  }
};

// The same of the numbers that round residuals: two words have them for a tile.
struct OfResiduals {
  __device__ static void Draw(const NoiseState& noise, uint32_t element, uint32_t lane,
                              uint32_t* numbers) {
    uint32_t words[4];
    PhiloxWords<Thread>(RoundingNoise(noise), RoundingCounter(element) + lane, words);
    const bool second = element % kRoundedRow / kTile;
    SplitWord<Thread>(second ? words[2] : words[0], numbers);
    SplitWord<Thread>(second ? words[3] : words[1], numbers + 2);
#pragma unroll
    for (int k = 0; k < 4; ++k) numbers[k] ^= RoundingFlip(element);
  }
};

// Called by all threads of a warp, which have the quads of two tiles in order.
template <class Of>
__device__ inline void DrawTogether(const NoiseState& noise, uint32_t element, uint32_t* numbers) {
  const uint32_t column = element % kLanes, quarter = element % kTile / kLanes;
  Of::Draw(noise, element, column + quarter, numbers);
  TransposeQuarters(numbers);
}

template <class Of>
__device__ inline void DrawAlone(const NoiseState& noise, uint32_t element, uint32_t* numbers) {
  const uint32_t column = element % kLanes, quarter = element % kTile / kLanes;
#pragma unroll
  for (uint32_t k = 0; k < 4; ++k) {
    uint32_t own[4];
    Of::Draw(noise, element, column + k, own);
    const uint32_t low = quarter & 1 ? own[1] : own[0];
    const uint32_t high = quarter & 1 ? own[3] : own[2];
    numbers[k] = quarter & 2 ? high : low;
  }
}

// together: whether DrawTogether may be called.
template <class Of>
__device__ inline void DrawNumbers(const NoiseState& noise, uint32_t element, bool together,
                                   uint32_t* numbers) {
  if (together) {
    DrawTogether<Of>(noise, element, numbers);
  } else {
    DrawAlone<Of>(noise, element, numbers);
  }
}

// The noise that rounds the codes and residuals of four elements, if they are rounded at random.
struct QuadNoise {
  Quad uniform;
  uint32_t rounding[4];
};

template <bool kCodes, int kResidual>
__device__ inline QuadNoise NoiseOf(const NoiseState& noise, uint32_t element, bool together) {
  QuadNoise all = {};
  if constexpr (kCodes) {
    uint32_t words[4];
    DrawNumbers<OfCodes>(noise, element, together, words);
#pragma unroll
    for (int k = 0; k < 4; ++k) all.uniform.v[k] = Uniform<Thread>(words[k]);
  }
  if constexpr (kResidual == HVDC_DTYPE_BFLOAT16) {
    DrawNumbers<OfResiduals>(noise, element, together, all.rounding);
  }
  return all;
}

// The number to encode, and the residual before the decoded number is subtracted.
struct Compensated {
  Quad x, kept;
};

// mode: the job's, perhaps known to the compiler.
__device__ inline Compensated CompensateQuad(const EncodeJob& job, Mode mode, const Quad& g,
                                             const Quad& h) {
  Compensated both;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    both.x.v[k] = g.v[k];
    if (mode != Mode::kNone) both.x.v[k] = Compensate<Thread>(g.v[k], h.v[k], job.alpha);
    both.kept.v[k] = both.x.v[k];
    if (mode == Mode::kGeneral) both.kept.v[k] = Compensate<Thread>(g.v[k], h.v[k], job.beta);
  }
  return both;
}

// The source of a block's elements: gradient and residual themselves, or the shared memory that
// holds them. kResidual: the dtype of residuals.
template <int kResidual>
struct FromTensor {
  template <bool kWhole>
  __device__ Compensated Load(const EncodeJob& job, uint32_t position, uint32_t valid) const {
    if (kWhole && job.aligned) return LoadAs<true>(job, position, 4);
    return LoadAs<false>(job, position, kWhole ? 4 : valid);
  }

  template <bool kAligned>
  __device__ Compensated LoadAs(const EncodeJob& job, uint32_t position, uint32_t valid) const {
    const uint32_t at = start + position;
    // The residual first: its type is known, so that both reads are under way together.
    Quad h = {};
    if (job.mode != Mode::kNone) h = LoadQuadAs<kResidual, kAligned>(job.residual, at, valid);
    const Quad g = WithDtype(job.dtype, [&](auto dtype) {
      return LoadQuadAs<decltype(dtype)::value, kAligned>(job.gradient, at, valid);
    });
    return CompensateQuad(job, job.mode, g, h);
  }

  uint32_t start;  // of the block
};

struct FromShared {
  template <bool kWhole>
  __device__ Compensated Load(const EncodeJob& job, uint32_t position, uint32_t) const {
    Compensated both;
    both.x = *reinterpret_cast<const Quad*>(x + position);
    both.kept = both.x;
    if (job.mode == Mode::kGeneral) both.kept = *reinterpret_cast<const Quad*>(kept + position);
    return both;
  }

  const float* x;
  const float* kept;  // only where the mode is general
  uint32_t start;
};

// A block of elements that are packed together, and where they are.
template <class Source>
struct Block {
  Source source;
  uint32_t codes;  // word of the payload at which its codes start
  uint32_t count;  // elements
};

// kResidual: the dtype of residuals.
template <class C, int kResidual>
struct QuadEncoder {
  // Encodes and stores a quad; called by all threads of a warp, quad by quad in order.
  template <class Source>
  __device__ static void Run(const EncodeJob& job, const C& coder, const GroupScale& scale,
                             const Block<Source>& block, uint32_t position, Totals* totals) {
    uint32_t codes[4];
    QuantizeInOrder(job, coder, scale, block, position, codes, totals);
    if constexpr (C::kType == CodeType::kBit || C::kPacking == Packing::kPlanes) {
      StorePlanes(job, block, position, codes, totals);
    } else {
      StoreDirect(job, block, position, codes, totals);
    }
  }

  // A held block's digits: a quad's four bytes take the place of its first element. Called like
  // Run.
  __device__ static void HoldDigits(const EncodeJob& job, const C& coder, const GroupScale& scale,
                                    const Block<FromShared>& block, uint32_t position, float* held,
                                    Totals* totals) {
    uint32_t codes[4];
    QuantizeInOrder(job, coder, scale, block, position, codes, totals);
    if (position < block.count) held[position] = BitsFloat(Bytes(codes));
  }

  // One word of a held block's trits, when all digits are there; words: of the block's trits.
  __device__ static void PackDigits(const EncodeJob& job, const Block<FromShared>& block,
                                    uint32_t word, uint32_t words, Totals* totals) {
    uint32_t packed = 0;
#pragma unroll
    for (int digit = 4; digit >= 0; --digit) {
      const uint32_t position = 4 * (static_cast<uint32_t>(digit) * words + word);
      const uint32_t four = position < block.count ? FloatBits(block.source.x[position]) : 0;
      packed = PushTrit(packed, four);
    }
    StoreWord(job, block.codes + word, packed, totals);
  }

  // One word of a block's trits, which holds five quads that stand far apart; words: of the block's
  // trits. Called by all threads of a warp with neighbouring words, perhaps of several blocks.
  __device__ static void Trits(const EncodeJob& job, const C& coder, const GroupScale& scale,
                               const Block<FromTensor<kResidual>>& block, uint32_t word,
                               uint32_t words, Totals* totals) {
    const bool here = word < words;
    const uint32_t size = 4 * words;
    // Whether half warps have tiles: a digit's elements start at one, and so does the first thread.
    const bool apart = size % kTile || (word ^ LaneOfWarp()) % kLanes;
    const bool shared = !__any_sync(kFullWarp, here && apart);
    uint32_t packed = 0;
#pragma unroll 1
    for (int digit = 4; digit >= 0; --digit) {
      const uint32_t position = static_cast<uint32_t>(digit) * size + 4 * word;
      const uint32_t element = block.source.start + position;
      const QuadNoise noise = NoiseOf<C::kNoise, kResidual>(job.noise, element, shared);
      uint32_t codes[4] = {};
      if (here) Quantize(job, coder, scale, block, position, noise, codes, totals);
      packed = PushTrit(packed, Bytes(codes));
    }
    if (here) StoreWord(job, block.codes + word, packed, totals);
  }

 private:
  using CodeOf = std::conditional_t<C::kType == CodeType::kBit, bool, uint32_t>;

  __device__ static uint32_t Bytes(const uint32_t* codes) {
    return (codes[0] & 0xFFu) | (codes[1] & 0xFFu) << 8 | (codes[2] & 0xFFu) << 16 | codes[3] << 24;
  }

  __device__ static void StoreWord(const EncodeJob& job, uint32_t index, uint32_t word,
                                   Totals* totals) {
    job.payload.As<uint32_t>()[index] = word;
    totals->Word(word, index);
  }

  // Quantizes for threads that come in order, as Run says.
  template <class Source>
  __device__ static void QuantizeInOrder(const EncodeJob& job, const C& coder,
                                         const GroupScale& scale, const Block<Source>& block,
                                         uint32_t position, uint32_t* codes, Totals* totals) {
    const uint32_t element = block.source.start + position;
    const QuadNoise noise = NoiseOf<C::kNoise, kResidual>(job.noise, element, true);
    Quantize(job, coder, scale, block, position, noise, codes, totals);
  }

  // Codes of the block's elements from position on; past its end they are 0.
  template <class Source>
  __device__ static void Quantize(const EncodeJob& job, const C& coder, const GroupScale& scale,
                                  const Block<Source>& block, uint32_t position,
                                  const QuadNoise& noise, uint32_t* codes, Totals* totals) {
    const uint32_t valid = ValidOf(position, block.count);
#pragma unroll
    for (int k = 0; k < 4; ++k) codes[k] = 0;
    if (valid == 4) {
      QuantizeAs<true>(job, coder, scale, block, position, valid, noise, codes, totals);
    } else if (valid) {
      QuantizeAs<false>(job, coder, scale, block, position, valid, noise, codes, totals);
    }
  }

  template <bool kWhole, class Source>
  __device__ static void QuantizeAs(const EncodeJob& job, const C& coder, const GroupScale& scale,
                                    const Block<Source>& block, uint32_t position, uint32_t valid,
                                    const QuadNoise& noise, uint32_t* codes, Totals* totals) {
    if (kWhole) valid = 4;  // as the compiler may know
    const uint32_t element = block.source.start + position;
    if (!scale.finite) {
      totals->nonfinite = true;
      if constexpr (C::kType == CodeType::kByte) {
#pragma unroll
        for (uint32_t k = 0; k < 4; ++k) {
          if (k < valid) codes[k] = coder.BlankCode();
        }
      }
      if (job.mode != Mode::kNone) {
        const Quad same = LoadQuadAs<kResidual, false>(job.residual, element, valid);
        StoreRest(job, element, valid, same, noise.rounding);
      }
      return;
    }
    const Compensated both = block.source.template Load<kWhole>(job, position, valid);
    Quad after;
    bool finite = true;
#pragma unroll
    for (uint32_t k = 0; k < 4; ++k) {
      const float x = scale.kept ? both.x.v[k] : 0.0f;
      const auto code = coder.Code(x, noise.uniform.v[k]);
      const float decoded = coder.Decode(code, k);
      after.v[k] = Thread::Sub(both.kept.v[k], decoded);
      if (k < valid) {
        codes[k] = code;
        finite = finite && IsFinite<Thread>(decoded);
      }
    }
    if constexpr (C::kCast) {
      if (!finite) {
        // Rare: those that decode to no finite number keep theirs.
        totals->nonfinite = true;
        if (job.mode == Mode::kNone) return;
        const Quad same = LoadQuadAs<kResidual, false>(job.residual, element, valid);
#pragma unroll
        for (uint32_t k = 0; k < 4; ++k) {
          const float decoded = coder.Decode(static_cast<CodeOf>(codes[k]), k);
          if (!IsFinite<Thread>(decoded)) after.v[k] = same.v[k];
        }
        return StoreRest(job, element, valid, after, noise.rounding);
      }
    }
    if (job.mode != Mode::kNone) StoreRest(job, element, valid, after, noise.rounding);
  }

  // A residual that stays as it is is rounded to itself.
  __device__ static void StoreRest(const EncodeJob& job, uint32_t element, uint32_t valid,
                                   const Quad& rest, const uint32_t* rounding) {
    if (valid == 4 && job.aligned) {
      StoreResidual<kResidual, true>(job.next_residual, element, 4, rest, rounding);
    } else {
      StoreResidual<kResidual, false>(job.next_residual, element, valid, rest, rounding);
    }
  }

  // Direct codes of a quad, as whole words; behind the last element stands padding.
  template <class Source>
  __device__ static void StoreDirect(const EncodeJob& job, const Block<Source>& block,
                                     uint32_t position, const uint32_t* codes, Totals* totals) {
    if (position >= block.count) return;
    uint32_t* const words = job.payload.As<uint32_t>();
    if constexpr (C::kType == CodeType::kByte) {
      StoreWord(job, block.codes + position / 4, Bytes(codes), totals);
    }
    if constexpr (C::kType == CodeType::kHalf) {
      const uint32_t at = block.codes + position / 2;
      const uint2 pair = make_uint2(codes[0] | codes[1] << 16, codes[2] | codes[3] << 16);
      *reinterpret_cast<uint2*>(words + at) = pair;
      totals->Word(pair.x, at);
      totals->Word(pair.y, at + 1);
    }
    if constexpr (C::kType == CodeType::kWord) {
      const uint32_t at = block.codes + position;
      *reinterpret_cast<uint4*>(words + at) = make_uint4(codes[0], codes[1], codes[2], codes[3]);
#pragma unroll
      for (uint32_t k = 0; k < 4; ++k) totals->Word(codes[k], at + k);
    }
  }

  // Bit planes: eight threads make the words of half a tile together, and each stores one of them.
  template <class Source>
  __device__ static void StorePlanes(const EncodeJob& job, const Block<Source>& block,
                                     uint32_t position, const uint32_t* codes, Totals* totals) {
    uint32_t word;
    if constexpr (C::kType == CodeType::kBit) {
      word = PlaneOfBits(codes[0] | codes[1] << 1 | codes[2] << 2 | codes[3] << 3);
    } else {
      word = PlaneOfCodes(Bytes(codes));
    }
    if (position / kTile * kTile >= block.count) return;
    const uint32_t place = PlaceInHalfTile();
    if (place < job.blocks.planes) {
      StoreWord(job, block.codes + PlaneWord(job.blocks, position, place), word, totals);
    }
  }
};

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CUDA_ENCODE_QUADS_H_
