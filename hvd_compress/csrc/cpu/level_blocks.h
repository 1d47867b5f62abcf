// Blocks as levels in lanes, with norms that the ranks agree on, and sums of such blocks back.
#ifndef HVDC_CPU_LEVEL_BLOCKS_H_
#define HVDC_CPU_LEVEL_BLOCKS_H_

#include "cpu/decode_blocks.h"
#include "cpu/encode_blocks.h"

namespace hvdc {
namespace HVDC_ARCH {

// codes is padded with codes of level 0 to a multiple of the lanes of a word.
template <class V, class C>
inline void PackLanes(const C& coder, const uint8_t* codes, int64_t count, int bits,
                      uint32_t* words) {
  using I = typename V::I;
  const int64_t size = LaneWords(count, bits);
  const auto word = [&](int64_t j) {
    I packed = V::SetI(0);
    for (int k = LanesOf(bits) - 1; k >= 0; --k) {
      const I level = coder.Level(C::LoadCodes(codes + k * size + j));
      packed = V::AddI(V::ShiftLeftBy(packed, bits), level);
    }
    return packed;
  };
  int64_t j = 0;
  for (; j + kLanes <= size; j += kLanes) V::StoreWords(words + j, word(j));
  if (j < size) {
    uint32_t rest[kLanes];
    V::StoreWords(rest, word(j));
    memcpy(words + j, rest, static_cast<size_t>(size - j) * sizeof(uint32_t));
  }
}

// Values of the levels' sums; up to 31 more than count are written.
template <class V, class C>
inline void UnpackLanes(const C& coder, const uint32_t* words, int64_t count, int bits,
                        float* values) {
  using I = typename V::I;
  const int64_t size = LaneWords(count, bits);
  const I bias = V::SetI(LaneBias(bits)), half = V::SetI(1u << (bits - 1));
  const I mask = V::SetI((1u << bits) - 1);
  // Lane by lane, so that what is written past one lane's values is overwritten by the next one's.
  for (int k = 0; k < LanesOf(bits); ++k) {
    const auto put = [&](const uint32_t* from, float* to) {
      const I lane = V::ShiftRightBy(V::AddI(V::LoadWords(from), bias), bits * k);
      V::Store(to, coder.Value(V::SubI(V::And(lane, mask), half)));
    };
    float* to = values + k * size;
    int64_t j = 0;
    for (; j + kLanes <= size; j += kLanes) put(words + j, to + j);
    if (j < size) {
      uint32_t rest[kLanes] = {};
      memcpy(rest, words + j, static_cast<size_t>(size - j) * sizeof(uint32_t));
      put(rest, to + j);
    }
  }
}

// The norms of blocks [first, last), each a bucket.
template <class V>
inline void LevelNorms(const EncodeJob& job, int64_t first, int64_t last, const Scratch& scratch,
                       float* norms) {
  const bool rotated = IsRotated(*job.spec);
  const StatsKind kind = rotated ? StatsKind::kNone : KindOf(*job.spec);
  const PrepareFunction prepare = PickPrepare<V>(kind, job.dtype, job.mode);
  for (int64_t block = first; block < last; ++block) {
    const int64_t count = BlockElements(job.layout, block);
    GroupStats stats = {};
    prepare(job, block * job.layout.block, count, scratch.x, scratch.kept, &stats);
    if (rotated) RotateBlock<V>(job, block, scratch, &stats);
    norms[block] = NormOf(*job.spec, stats, count);
  }
}

template <class V, class C>
struct LevelBlocks {
  static GroupScale ScaleOfBlock(const hvdc_spec& spec, const LevelWords& levels, int64_t block) {
    return ScaleOfNorm(spec, levels.norms[IsContiguous(spec) ? block : 0]);
  }

  static uint32_t* WordsOf(const LevelWords& levels, const Layout& layout, int64_t block) {
    return levels.words + block * LaneWords(layout.block, levels.bits);
  }

  static void Encode(const EncodeJob& job, const LevelWords& levels, int64_t first, int64_t last,
                     const Scratch& scratch) {
    const PrepareFunction prepare = PickPrepare<V>(StatsKind::kNone, job.dtype, job.mode);
    C coder(CoderSetup{job.spec, nullptr});
    Rounder<V> rounder(job.noise);
    for (int64_t block = first; block < last; ++block) {
      const int64_t count = BlockElements(job.layout, block);
      uint32_t* words = WordsOf(levels, job.layout, block);
      const GroupScale scale = ScaleOfBlock(*job.spec, levels, block);
      if (!scale.finite) {  // Nothing is sent, and the residual stays.
        memset(words, 0, static_cast<size_t>(LaneWords(count, levels.bits)) * sizeof(uint32_t));
        KeepResiduals(job, block * job.layout.block, count);
        continue;
      }
      GroupStats unused = {};
      prepare(job, block * job.layout.block, count, scratch.x, scratch.kept, &unused);
      if (IsRotated(*job.spec)) RotateBlock<V>(job, block, scratch, &unused);
      coder.SetGroup(scale);
      BlockEncoder<V, C>::QuantizeBlock(job, coder, scale.kept, block, scratch, &rounder,
                                        scratch.codes);
      memset(scratch.codes + count, static_cast<int>(coder.ZeroCode()), kTile);
      PackLanes<V>(coder, scratch.codes, count, levels.bits, words);
    }
    if (job.stream) V::FinishStreams();
  }

  static void Decode(const DecodeJob& job, const LevelWords& levels, int64_t first, int64_t last,
                     const Scratch& scratch) {
    C coder(CoderSetup{job.spec, nullptr});
    for (int64_t block = first; block < last; ++block) {
      const int64_t count = BlockElements(job.layout, block);
      coder.SetGroup(ScaleOfBlock(*job.spec, levels, block));
      const C fixed = coder;  // a copy whose members can stay in registers
      UnpackLanes<V>(fixed, WordsOf(levels, job.layout, block), count, levels.bits, scratch.x);
      if (IsRotated(*job.spec)) {
        TransformGroup<V>(scratch.x, job.layout.block, count);
        ChangeSigns<V>(scratch.x, scratch.x, count);
      }
      Finish<V>(job, scratch.x, count, block * job.layout.block);
    }
  }
};

template <class V>
inline void EncodeLevels(const EncodeJob& job, const LevelWords& levels, int64_t first,
                         int64_t last, const Scratch& scratch) {
  if (job.spec->codec == HVDC_TERNARY) {
    return LevelBlocks<V, TernaryCoder<V>>::Encode(job, levels, first, last, scratch);
  }
  return LevelBlocks<V, EcqCoder<V>>::Encode(job, levels, first, last, scratch);
}

template <class V>
inline void DecodeLevels(const DecodeJob& job, const LevelWords& levels, int64_t first,
                         int64_t last, const Scratch& scratch) {
  if (job.spec->codec == HVDC_TERNARY) {
    return LevelBlocks<V, TernaryCoder<V>>::Decode(job, levels, first, last, scratch);
  }
  return LevelBlocks<V, EcqCoder<V>>::Decode(job, levels, first, last, scratch);
}

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CPU_LEVEL_BLOCKS_H_
