// The layout of payloads: headers, sizes and offsets, and nothing about the numbers in them
// (docs/format.md).
#ifndef HVDC_CODEC_LAYOUT_H_
#define HVDC_CODEC_LAYOUT_H_

#include "codec/macros.h"
#include "codec/types.h"

namespace hvdc {

constexpr int64_t kHeaderBytes = 32;
constexpr uint16_t kMagic = 0x4348;
constexpr uint8_t kFormatVersion = 1;
constexpr uint32_t kFlagNonfinite = 1;
constexpr uint32_t kFlagCoded = 2;  // and from bit kLengthShift on, the length in kLengthUnit bytes
constexpr int kLengthShift = 4;
constexpr int64_t kLengthUnit = 16;
constexpr int64_t kChunkElements = 65536;        // the most in an entropy-coded chunk
constexpr int kTopKFloatBits = 32;               // the bits of unrounded values
constexpr int64_t kMaxCount = int64_t{1} << 44;  // so that no size overflows

// The first 32 bytes of a payload.
struct Header {
  uint16_t magic;
  uint8_t version, codec;
  uint32_t config_hash;
  uint64_t count;
  uint32_t flags, step;
  uint64_t checksum;
};
static_assert(sizeof(Header) == kHeaderBytes, "the header has no padding");

namespace HVDC_ARCH {

HVDC_HD int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

HVDC_HD int64_t PlaneBytes(int64_t count, int bits) {
  return (count + kTile - 1) / kTile * 8 * bits;
}

HVDC_HD int64_t TritBytes(int64_t count) { return (count + 19) / 20 * 4; }

// Bits of an ECQ code: the ceiling of log2(2 s + 1).
HVDC_HD int EcqBits(uint32_t levels) {
  int bits = 0;
  for (uint32_t rest = 2 * levels; rest; rest >>= 1) ++bits;
  return bits;
}

HVDC_HD bool IsCast(const hvdc_spec& spec) {
  return spec.codec >= HVDC_FP16 && spec.codec <= HVDC_FP32;
}

// Whether 8-bit numbers have a fixed range, which no maximum sets.
HVDC_HD bool IsFixed(const hvdc_spec& spec) {
  return spec.variant == HVDC_STATIC || spec.variant == HVDC_MANTISSA;
}

// Whether its numbers are whole multiples of a unit.
HVDC_HD bool HasLevels(const hvdc_spec& spec) {
  return spec.codec == HVDC_TERNARY || spec.codec == HVDC_ECQ;
}

// Whether every block has scales of its own.
HVDC_HD bool IsContiguous(const hvdc_spec& spec) {
  return !IsCast(spec) && spec.grouping == HVDC_CONTIGUOUS;
}

// Whether groups are rotated before they are quantized.
HVDC_HD bool IsRotated(const hvdc_spec& spec) {
  return spec.codec == HVDC_ECQ && spec.variant == HVDC_ROTATED_LINF;
}

// Whether payloads may be shorter than what the layout says.
HVDC_HD bool IsEntropyCoded(const hvdc_spec& spec) { return spec.coding == HVDC_ENTROPY; }

// The number of codes of a codec that has levels.
HVDC_HD int Alphabet(const hvdc_spec& spec) {
  return spec.codec == HVDC_TERNARY ? 3 : static_cast<int>(2 * spec.levels + 1);
}

// Elements that a chunk of count elements sends.
HVDC_HD int64_t TopKKept(const hvdc_spec& spec, int64_t count) {
  return (spec.levels * count + spec.group - 1) / spec.group;
}

// Bits of an index within a chunk.
HVDC_HD int TopKIndexBits(const hvdc_spec& spec) {
  int bits = 0;
  for (uint32_t rest = spec.group - 1; rest; rest >>= 1) ++bits;
  return bits;
}

HVDC_HD int64_t TopKBytes(const hvdc_spec& spec, int64_t count) {
  const int64_t entry = TopKIndexBits(spec) + static_cast<int64_t>(spec.variant);
  return (TopKKept(spec, count) * entry + 31) / 32 * 4;
}

HVDC_HD int64_t CodeBytes(const hvdc_spec& spec, int64_t count) {
  switch (spec.codec) {
    case HVDC_ONEBIT:
      return PlaneBytes(count, 1);
    case HVDC_INT8:
      return count;
    case HVDC_TERNARY:
      return TritBytes(count);
    case HVDC_ECQ:
      return PlaneBytes(count, EcqBits(spec.levels));
    case HVDC_TOPK:
      return TopKBytes(spec, count);
    case HVDC_FP32:
      return 4 * count;
    default:
      return 2 * count;
  }
}

HVDC_HD bool ValidSpec(const hvdc_spec& spec) {
  if (spec.codec < HVDC_ONEBIT || spec.codec > HVDC_TOPK) return false;
  if (spec.rows < 0 || spec.columns < 0) return false;
  if (spec.rows && spec.columns > kMaxCount / spec.rows) return false;
  if (spec.coding > HVDC_ENTROPY || (spec.coding && !HasLevels(spec))) return false;
  if (IsCast(spec)) return spec.variant <= (spec.codec == HVDC_BF16 ? 1u : 0u);
  if (spec.grouping > (spec.codec == HVDC_ONEBIT ? HVDC_COLUMN : HVDC_TENSOR)) return false;
  if (spec.grouping == HVDC_CONTIGUOUS &&
      (spec.group == 0 || spec.group > kMaxGroup || spec.group % kTile)) {
    return false;
  }
  const bool positive = spec.factor > 0 && spec.factor <= 1e30f;
  switch (spec.codec) {
    case HVDC_INT8:
      return spec.variant <= HVDC_E5M2 && (!IsFixed(spec) || (positive && spec.factor >= 1e-30f));
    case HVDC_TERNARY:
      return positive || spec.factor == 0;
    case HVDC_ECQ:
      return spec.variant <= HVDC_ROTATED_LINF && spec.levels >= 1 && spec.levels <= 127 &&
             (!IsRotated(spec) || (IsContiguous(spec) && !(spec.group & (spec.group - 1))));
    case HVDC_TOPK:
      return spec.grouping == HVDC_CONTIGUOUS && spec.levels >= 1 && spec.levels <= spec.group &&
             spec.variant >= 1 && (spec.variant <= 8 || spec.variant == kTopKFloatBits);
    default:
      return true;
  }
}

// The layout for a valid spec.
HVDC_HD Layout MakeLayout(const hvdc_spec& spec) {
  Layout layout;
  const int64_t count = spec.rows * spec.columns;
  layout.count = count;
  layout.block = IsContiguous(spec) ? spec.group : kPackBlock;
  layout.blocks = (count + layout.block - 1) / layout.block;
  layout.chunk = IsEntropyCoded(spec) ? kChunkElements / layout.block : 1;
  int64_t groups = 1;
  if (IsContiguous(spec)) groups = layout.blocks;
  if (spec.codec == HVDC_ONEBIT && spec.grouping == HVDC_ROW) groups = spec.rows;
  if (spec.codec == HVDC_ONEBIT && spec.grouping == HVDC_COLUMN) groups = spec.columns;
  if (IsCast(spec) || !count) groups = 0;
  layout.scales = spec.codec == HVDC_ONEBIT ? 2 * groups : groups;
  layout.block_bytes = CodeBytes(spec, layout.block);
  const int64_t rest = count % layout.block;
  layout.last_bytes = CodeBytes(spec, rest ? rest : layout.block);
  layout.codes_offset = kHeaderBytes + RoundUp(4 * layout.scales, 16);
  const int64_t codes =
      layout.blocks ? (layout.blocks - 1) * layout.block_bytes + layout.last_bytes : 0;
  layout.payload_bytes = RoundUp(layout.codes_offset + codes, 16);
  return layout;
}

HVDC_HD int64_t BlockOffset(const Layout& layout, int64_t block) {
  return layout.codes_offset + block * layout.block_bytes;
}

HVDC_HD int64_t BlockElements(const Layout& layout, int64_t block) {
  const int64_t rest = layout.count - block * layout.block;
  return rest < layout.block ? rest : layout.block;
}

HVDC_HD int64_t Chunks(const Layout& layout) {
  return (layout.blocks + layout.chunk - 1) / layout.chunk;
}

// The elements of blocks [first, last).
HVDC_HD int64_t RangeElements(const Layout& layout, int64_t first, int64_t last) {
  const int64_t rest = layout.count - first * layout.block;
  const int64_t full = (last - first) * layout.block;
  return rest < full ? rest : full;
}

// The end of the codes of the blocks before this one; the last block's take the padding in.
HVDC_HD int64_t RegionEnd(const Layout& layout, int64_t block) {
  return block == layout.blocks ? layout.payload_bytes : BlockOffset(layout, block);
}

// The header of a payload but for its flags and checksum, which are 0.
HVDC_HD Header MakeHeader(const hvdc_spec& spec, const Layout& layout, uint32_t step) {
  Header header = {};
  header.magic = kMagic;
  header.version = kFormatVersion;
  header.codec = static_cast<uint8_t>(spec.codec);
  header.config_hash = spec.config_hash;
  header.count = static_cast<uint64_t>(layout.count);
  header.step = step;
  return header;
}

// Whether a payload is of this configuration, size and step; flags and checksum are not looked at.
HVDC_HD bool HeaderFits(const hvdc_spec& spec, const Layout& layout, uint32_t step,
                        const Header& header) {
  return header.magic == kMagic && header.version == kFormatVersion && header.codec == spec.codec &&
         header.config_hash == spec.config_hash &&
         header.count == static_cast<uint64_t>(layout.count) && header.step == step;
}

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CODEC_LAYOUT_H_
