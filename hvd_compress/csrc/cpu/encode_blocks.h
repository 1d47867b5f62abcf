// The second half of encoding a block: x is quantized, the residual updated, the codes packed.
#ifndef HVDC_CPU_ENCODE_BLOCKS_H_
#define HVDC_CPU_ENCODE_BLOCKS_H_

#include <type_traits>

#include "codec/philox.h"
#include "cpu/blocks.h"
#include "cpu/decode_blocks.h"
#include "cpu/packing.h"
#include "cpu/prepare.h"
#include "cpu/residuals.h"

namespace hvdc {
namespace HVDC_ARCH {

// The memory that the next block will read. Memory would stand idle while a block is computed, so
// the next block is fetched meanwhile, a tile at a time.
struct Ahead {
  Ahead(const EncodeJob& job, int64_t next) {
    const Layout& layout = job.layout;
    if (next >= layout.blocks || layout.block > kMaxBlock) return;
    const int64_t start = next * layout.block;
    tile_bytes = kTile * (job.dtype == HVDC_DTYPE_FLOAT32 ? 4 : 2);
    gradient = static_cast<const char*>(job.gradient) + start / kTile * tile_bytes;
    residual_bytes = kTile * job.residual_width;
    if (job.mode != Mode::kNone) residual = job.ResidualAt(start);
    tiles = BlockElements(layout, next) / kTile;
  }

  HVDC_HD void Prefetch(int64_t tile) const {
    if (tile >= tiles) return;
    for (int byte = 0; byte < tile_bytes; byte += 64) {
      __builtin_prefetch(gradient + tile * tile_bytes + byte);
    }
    if (!residual) return;
    for (int byte = 0; byte < residual_bytes; byte += 64) {
      __builtin_prefetch(residual + tile * residual_bytes + byte);
    }
  }

  static constexpr int64_t kMaxBlock = 4096;  // longer ones the hardware finds in time
  const char* gradient = nullptr;
  const char* residual = nullptr;
  int tile_bytes = 0, residual_bytes = 0;
  int64_t tiles = 0;
};

template <class V, class C>
struct BlockEncoder {
  using F = typename V::F;
  using I = typename V::I;
  using T = typename CodeMemory<C::kType>::T;
  static constexpr bool kMatrix = std::is_same<C, OneBitMatrixCoder<V>>::value;
  static constexpr int kParts = kTile / kLanes;

  // The number of T that a tile's codes take before packing.
  static constexpr int kTileCodes = C::kType == CodeType::kBit ? kTile / 8 : kTile;

  // One tile; largest collects the absolute bits of what casts decode to. kWidth: of a residual in
  // bytes, 0 without.
  template <int kWidth>
  HVDC_HD static void Tile(const C& coder, const NoiseState& noise, uint32_t tile, int64_t element,
                           const float* x, const float* kept, const Rounder<V>& rounder,
                           const ResidualSink<V>& residual, T* codes, I* largest) {
    I words[4];
    if constexpr (C::kNoise) {
      const I counter = V::AddI(V::SetI(16 * tile), V::LaneNumbers());
      PhiloxWords<V>(noise, counter, words);
    }
    // All codes of the tile first: what happens to one does not wait for it then.
    uint64_t bits = 0;
    F parts[kParts];
    decltype(coder.Code(parts[0], parts[0])) found[kParts];
    for (int part = 0; part < kParts; ++part) parts[part] = V::Load(x + kLanes * part);
    if constexpr (C::kTogether) {
      coder.template Codes<kParts>(parts, found);
    } else {
      for (int part = 0; part < kParts; ++part) {
        F uniform = V::Set(0.0f);
        if constexpr (C::kNoise) uniform = Uniform<V>(words[part]);
        found[part] = coder.Code(parts[part], uniform);
      }
    }
    for (int part = 0; part < kParts; ++part) {
      const int at = kLanes * part;
      const auto code = found[part];
      if constexpr (C::kType == CodeType::kBit) {
        bits |= static_cast<uint64_t>(V::ToMaskBits(code)) << at;
      }
      if constexpr (C::kType == CodeType::kByte) V::StoreBytes(codes + at, code);
      if constexpr (C::kType == CodeType::kHalf) V::StoreShorts(codes + at, code);
      if constexpr (C::kType == CodeType::kWord) V::StoreWords(codes + at, code);
      if constexpr (kWidth || C::kCast) {
        const F decoded = coder.Decode(code, element + at);
        if constexpr (C::kCast) *largest = V::MaxI(*largest, AbsBits<V>(decoded));
        if constexpr (kWidth != 0) {
          const F rest = V::Load(kept + at);
          residual.template Put<kWidth, C::kAlwaysFinite>(rounder, at, rest, decoded);
        }
      }
    }
    if constexpr (C::kType == CodeType::kBit) memcpy(codes, &bits, sizeof(bits));
  }

  // count elements, the first of them element start of the tensor. Codes of the last tile are
  // written in full where they are packed, else up to the last element.
  template <int kWidth>
  static uint32_t Quantize(const C& coder_, const NoiseState& noise, int64_t start, int64_t count,
                           const float* x, const float* kept, Rounder<V>* rounder,
                           const ResidualSink<V>& residual_, T* codes, const Ahead& ahead) {
    const C coder = coder_;  // copies whose members can stay in registers
    const ResidualSink<V> residual = residual_;
    I largest = V::SetI(0);
    uint32_t tile = static_cast<uint32_t>(start / kTile);
    int64_t i = 0;
    for (; i + kTile <= count; i += kTile, ++tile, codes += kTileCodes) {
      if constexpr (!C::kCast) ahead.Prefetch(i / kTile);
      if constexpr (kWidth == 2) rounder->MoveTo(start + i);
      Tile<kWidth>(coder, noise, tile, i, x + i, kept + i, *rounder, residual.From(i), codes,
                   &largest);
    }
    if (const size_t rest = static_cast<size_t>(count - i)) {
      float x_rest[kTile] = {}, kept_rest[kTile] = {};
      char h_rest[kTile * sizeof(float)] = {};
      const size_t h_bytes = rest * static_cast<size_t>(kWidth);
      T codes_rest[kTile];
      memcpy(x_rest, x + i, rest * sizeof(float));
      if constexpr (kWidth != 0) {
        memcpy(kept_rest, kept + i, rest * sizeof(float));
        memcpy(h_rest, residual.From(i).before, h_bytes);
        if constexpr (kWidth == 2) rounder->MoveTo(start + i);
      }
      const ResidualSink<V> last = {h_rest, h_rest, kWidth, false};
      Tile<kWidth>(coder, noise, tile, i, x_rest, kept_rest, *rounder, last, codes_rest, &largest);
      if constexpr (kWidth != 0) memcpy(residual.From(i).after, h_rest, h_bytes);
      if constexpr (C::kType == CodeType::kBit) {
        uint64_t bits;
        memcpy(&bits, codes_rest, sizeof(bits));
        bits &= (uint64_t{1} << rest) - 1;
        memcpy(codes, &bits, sizeof(bits));
      } else {
        memcpy(codes, codes_rest, rest * sizeof(T));
      }
    }
    return V::LargestLane(largest);
  }

  // The same for a block that RotateBlock has rotated; what is decoded turns back before it is
  // subtracted.
  static uint32_t QuantizeRotated(const EncodeJob& job, const C& coder, bool scale_kept,
                                  int64_t block, const Scratch& scratch, Rounder<V>* rounder,
                                  T* codes) {
    const int64_t start = block * job.layout.block;
    const int64_t count = BlockElements(job.layout, block);
    float* const x = scratch.lower;
    if (!scale_kept) memset(x, 0, static_cast<size_t>(count) * sizeof(float));
    const Ahead ahead(job, block + 1);
    Quantize<0>(coder, job.noise, start, count, x, x, rounder, {}, codes, ahead);
    if (job.mode == Mode::kNone) return 0;
    float* const decoded = scratch.upper;
    BlockDecoder<V, C>::TurnBack(coder, codes, job.layout.block, count, decoded);
    const float* const kept = job.mode == Mode::kGeneral ? scratch.kept : scratch.x;
    StoreResiduals<V>(job, rounder, start, count, kept, decoded);
    return 0;
  }

  // A block that has been prepared, by a coder that has its scale, which may be too small.
  static uint32_t QuantizeBlock(const EncodeJob& job, const C& coder, bool scale_kept,
                                int64_t block, const Scratch& scratch, Rounder<V>* rounder,
                                T* codes) {
    if constexpr (C::kRotates) {
      if (IsRotated(*job.spec)) {
        return QuantizeRotated(job, coder, scale_kept, block, scratch, rounder, codes);
      }
    }
    const int64_t start = block * job.layout.block;
    const int64_t count = BlockElements(job.layout, block);
    const bool in_place = job.mode == Mode::kNone && job.dtype == HVDC_DTYPE_FLOAT32;
    const float* x = in_place ? static_cast<const float*>(job.gradient) + start : scratch.x;
    const float* kept = job.mode == Mode::kGeneral ? scratch.kept : scratch.x;
    if (!scale_kept) {
      if (job.mode == Mode::kShared) {
        memcpy(scratch.kept, scratch.x, static_cast<size_t>(count) * sizeof(float));
        kept = scratch.kept;
      }
      memset(scratch.x, 0, static_cast<size_t>(count) * sizeof(float));
      x = scratch.x;
    }
    const Ahead ahead(job, block + 1);
    if (job.mode == Mode::kNone) {
      return Quantize<0>(coder, job.noise, start, count, x, x, rounder, {}, codes, ahead);
    }
    const auto quantize = job.residual_width == 2 ? Quantize<2> : Quantize<4>;
    return quantize(coder, job.noise, start, count, x, kept, rounder, SinkOf<V>(job, start), codes,
                    ahead);
  }

  // Packs the codes, and counts them where they are to be entropy coded.
  static void Pack(const EncodeJob& job, const Scratch& scratch, int64_t count, uint8_t* packed) {
    uint8_t* const codes = scratch.codes;
    if constexpr (C::kPacking != Packing::kDirect) {
      if (IsEntropyCoded(*job.spec)) {
        CountCodes<V>(codes, count, Alphabet(*job.spec), scratch.counts);
      }
    }
    if constexpr (C::kPacking == Packing::kPlanes) {
      memset(codes + count, 0, kTile);
      PackPlanes<V>(codes, count, EcqBits(job.spec->levels), packed);
    }
    if constexpr (C::kPacking == Packing::kTrits) {
      memset(codes + count, 0, 20);
      PackTrits(codes, count, packed);
    }
  }

  // A group that is not finite: codes that say nothing, and the residual stays.
  static void Blank(const EncodeJob& job, const C& coder, int64_t block, int64_t count,
                    const Scratch& scratch) {
    KeepResiduals(job, block * job.layout.block, count);
    uint8_t* packed = job.payload + BlockOffset(job.layout, block);
    if constexpr (C::kType == CodeType::kBit) {
      memset(packed, 0, static_cast<size_t>(PlaneBytes(count, 1)));
    } else if constexpr (C::kType == CodeType::kByte) {
      uint8_t* codes = C::kPacking == Packing::kDirect ? packed : scratch.codes;
      memset(codes, static_cast<int>(coder.BlankCode()), static_cast<size_t>(count));
      Pack(job, scratch, count, packed);
    }
  }

  static void Run(const EncodeJob& job, int64_t first, int64_t last, const Scratch& scratch,
                  EncodeResult* result) {
    const int64_t step = BlocksPerRun(job.layout);
    for (int64_t next; first < last; first = next) {
      next = first + step < last ? first + step : last;
      Blocks(job, first, next, scratch, result);
    }
    if (job.stream) V::FinishStreams();
  }

  // A few blocks, whose checksum is taken while they are in the cache.
  static void Blocks(const EncodeJob& job, int64_t first, int64_t last, const Scratch& scratch,
                     EncodeResult* result) {
    const Layout& layout = job.layout;
    const bool contiguous = IsContiguous(*job.spec);
    const bool rotated = IsRotated(*job.spec);
    const StatsKind kind = contiguous && !rotated ? KindOf(*job.spec) : StatsKind::kNone;
    const PrepareFunction prepare = PickPrepare<V>(kind, job.dtype, job.mode);
    C coder(CoderSetup{job.spec, job.tables});
    Rounder<V> rounder(job.noise);
    GroupScale scale = job.group;
    if (!contiguous) coder.SetGroup(scale);
    if (last == layout.blocks) {
      const int64_t end = BlockOffset(layout, last - 1) + layout.last_bytes;
      memset(job.payload + end, 0, static_cast<size_t>(layout.payload_bytes - end));
    }
    for (int64_t block = first; block < last; ++block) {
      const int64_t start = block * layout.block;
      const int64_t count = BlockElements(layout, block);
      GroupStats stats = {};
      if (contiguous || scale.finite) {
        prepare(job, start, count, scratch.x, scratch.kept, &stats);
      }
      if (rotated) RotateBlock<V>(job, block, scratch, &stats);
      if (contiguous) {
        scale = ScaleOf(*job.spec, stats, count);
        if constexpr (C::kType == CodeType::kBit) {
          StoreScale(job.payload, block, scale.lower);
          StoreScale(job.payload, layout.blocks + block, scale.upper);
        } else {
          StoreScale(job.payload, block, scale.sent);
        }
        coder.SetGroup(scale);
      }
      if (!scale.finite) {
        result->nonfinite = true;
        Blank(job, coder, block, count, scratch);
        continue;
      }
      if constexpr (kMatrix) {
        FillMatrixValues(*job.spec, job.payload, start, count, scratch.lower, scratch.upper);
        coder.lower = scratch.lower;
        coder.upper = scratch.upper;
      }
      uint8_t* packed = job.payload + BlockOffset(layout, block);
      T* codes = reinterpret_cast<T*>(C::kPacking == Packing::kDirect ? packed : scratch.codes);
      const uint32_t largest =
          QuantizeBlock(job, coder, scale.kept, block, scratch, &rounder, codes);
      if (C::kCast && largest >= kInfinityBits) result->nonfinite = true;
      Pack(job, scratch, count, packed);
    }
    result->checksum += BlocksChecksum<V>(*job.spec, layout, job.payload, first, last);
  }
};

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CPU_ENCODE_BLOCKS_H_
