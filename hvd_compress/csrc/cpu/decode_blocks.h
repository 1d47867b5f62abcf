// Decoding: blocks of one or many payloads into a sum, or back into a residual.
#ifndef HVDC_CPU_DECODE_BLOCKS_H_
#define HVDC_CPU_DECODE_BLOCKS_H_

#include <type_traits>

#include "cpu/blocks.h"
#include "cpu/packing.h"
#include "cpu/rotation.h"

namespace hvdc {
namespace HVDC_ARCH {

// A store waits until its line has been read, unless the line is on its way already: processors
// look ahead for loads, less so for stores. So sums ask for lines themselves, a page ahead; what is
// beyond the end does no harm.
HVDC_HD void ExpectStores(const void* here) {
  constexpr uintptr_t kAhead = 4096;
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(here) + kAhead), 1);
}

// The destinations of decoded numbers, sixteen at a time.
template <class V>
struct AddSink {  // added
  HVDC_HD void Put(int64_t i, typename V::F decoded) const {
    V::Store(to + i, V::Add(V::Load(to + i), decoded));
  }
  float* to;
};

template <class V>
struct StoreSink {
  HVDC_HD void Put(int64_t i, typename V::F decoded) const { V::Store(to + i, decoded); }
  float* to;
};

// A sum of one is finished at once; +0 comes first in every sum and makes -0 a +0.
template <class V>
struct FinishSink {
  HVDC_HD void Put(int64_t i, typename V::F decoded) const {
    ExpectStores(to + i);
    V::Store(to + i, V::Mul(V::Add(V::Set(0.0f), decoded), scale));
  }
  float* to;
  typename V::F scale;
};

template <class V, int kDtype>
inline void FinishSums(const float* sums, int64_t count, float scale, void* out, int64_t start) {
  using E = Elements<V, kDtype>;
  using T = typename E::T;
  const typename V::F factor = V::Set(scale);
  T* to = static_cast<T*>(out) + start;
  const auto finish = [factor](const float* sum, T* target) {
    ExpectStores(target);
    E::Store(target, V::Mul(V::Load(sum), factor));
  };
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) finish(sums + i, to + i);
  if (const size_t rest = static_cast<size_t>(count - i)) {
    T last[kLanes];
    finish(sums + i, last);
    memcpy(to + i, last, rest * sizeof(T));
  }
}

// sums is padded to sixteen elements.
template <class V>
inline void Finish(const DecodeJob& job, const float* sums, int64_t count, int64_t start) {
  void* out = job.out;
  const float scale = job.scale;
  switch (job.dtype) {
    case HVDC_DTYPE_FLOAT32:
      return FinishSums<V, HVDC_DTYPE_FLOAT32>(sums, count, scale, out, start);
    case HVDC_DTYPE_FLOAT16:
      return FinishSums<V, HVDC_DTYPE_FLOAT16>(sums, count, scale, out, start);
    default:
      return FinishSums<V, HVDC_DTYPE_BFLOAT16>(sums, count, scale, out, start);
  }
}

template <class V, class C>
struct BlockDecoder {
  using F = typename V::F;
  using T = typename CodeMemory<C::kType>::T;
  static constexpr bool kMatrix = std::is_same<C, OneBitMatrixCoder<V>>::value;
  static constexpr int kTileCodes = C::kType == CodeType::kBit ? kTile / 8 : kTile;

  template <class Sink>
  HVDC_HD static void Tile(const C& coder, const T* codes, int64_t element, const Sink& sink) {
    uint64_t bits = 0;
    if constexpr (C::kType == CodeType::kBit) memcpy(&bits, codes, sizeof(bits));
    for (int at = 0; at < kTile; at += kLanes) {
      F decoded;
      if constexpr (C::kType == CodeType::kBit) {
        const auto side = V::FromMaskBits(static_cast<uint32_t>(bits >> at) & 0xFFFFu);
        decoded = coder.Decode(side, element + at);
      }
      if constexpr (C::kType == CodeType::kByte) {
        decoded = coder.Decode(C::LoadCodes(codes + at), element + at);
      }
      if constexpr (C::kType == CodeType::kHalf) {
        decoded = coder.Decode(V::LoadShorts(codes + at), element + at);
      }
      if constexpr (C::kType == CodeType::kWord) {
        decoded = coder.Decode(V::LoadWords(codes + at), element + at);
      }
      sink.Put(element + at, decoded);
    }
  }

  // Elements [begin, end) of a block, begin at a tile; the last tile is filled up with blank codes,
  // and put in full.
  template <class Sink>
  static void Dequantize(const C& coder_, const T* codes, int64_t begin, int64_t end,
                         const Sink& sink_) {
    const C coder = coder_;  // copies whose members can stay in registers
    const Sink sink = sink_;
    int64_t i = begin;
    codes += begin / kTile * kTileCodes;
    for (; i + kTile <= end; i += kTile, codes += kTileCodes) Tile(coder, codes, i, sink);
    if (i < end) {
      T rest[kTile] = {};
      const int64_t size = C::kType == CodeType::kBit ? kTileCodes : end - i;
      memcpy(rest, codes, static_cast<size_t>(size) * sizeof(T));
      Tile(coder, rest, i, sink);
    }
  }

  // Adds a block of a payload to sums, from element begin on. A rotated block, from 0 on, turns
  // back first, in scratch.lower.
  static void Add(const DecodeJob& job, const C& coder, const T* codes, int64_t begin,
                  int64_t count, const Scratch& scratch, float* sums) {
    if constexpr (C::kRotates) {
      if (IsRotated(*job.spec)) {
        const float* const turned = scratch.lower;
        TurnBack(coder, codes, job.layout.block, count, scratch.lower);
        for (int64_t i = 0; i < count; i += kLanes) AddSink<V>{sums}.Put(i, V::Load(turned + i));
        return;
      }
    }
    Dequantize(coder, codes, begin, count, AddSink<V>{sums});
  }

  // Decodes a rotated group; up to a tile more is written.
  static void TurnBack(const C& coder, const T* codes, int64_t group, int64_t count, float* to) {
    Dequantize(coder, codes, 0, count, StoreSink<V>{to});
    TransformGroup<V>(to, group, count);
    ChangeSigns<V>(to, to, count);
  }

  // Scales of the block into the coder.
  static void OpenScales(const DecodeJob& job, const uint8_t* payload, int64_t block, int64_t count,
                         const Scratch& scratch, C* coder) {
    const Layout& layout = job.layout;
    if constexpr (kMatrix) {
      FillMatrixValues(*job.spec, payload, block * layout.block, count, scratch.lower,
                       scratch.upper);
      coder->lower = scratch.lower;
      coder->upper = scratch.upper;
    } else if constexpr (!C::kCast) {
      const int64_t group = IsContiguous(*job.spec) ? block : 0;
      GroupScale scale = {};
      if constexpr (C::kType == CodeType::kBit) {
        scale.lower = LoadScale(payload, group);
        scale.upper = LoadScale(payload, layout.scales / 2 + group);
      } else {
        scale.sent = LoadScale(payload, group);
      }
      coder->SetGroup(scale);
    }
  }

  // The same, and codes out of their packing.
  static const T* Open(const DecodeJob& job, const uint8_t* payload, int64_t block, int64_t count,
                       const Scratch& scratch, C* coder) {
    OpenScales(job, payload, block, count, scratch, coder);
    const uint8_t* packed = payload + BlockOffset(job.layout, block);
    if constexpr (C::kPacking == Packing::kDirect) return reinterpret_cast<const T*>(packed);
    if constexpr (C::kPacking == Packing::kPlanes) {
      UnpackPlanes<V>(packed, count, EcqBits(job.spec->levels), scratch.codes);
    }
    if constexpr (C::kPacking == Packing::kTrits) UnpackTrits(packed, count, scratch.codes);
    return reinterpret_cast<const T*>(scratch.codes);
  }

  static void Sum(const DecodeJob& job, int64_t first, int64_t last, const Scratch& scratch) {
    C coder(CoderSetup{job.spec, job.tables});
    const bool direct = job.count == 1 && job.dtype == HVDC_DTYPE_FLOAT32 && !IsRotated(*job.spec);
    for (int64_t block = first; block < last; ++block) {
      const int64_t start = block * job.layout.block;
      const int64_t count = BlockElements(job.layout, block);
      int64_t done = 0;
      if (direct) {
        const T* codes = Open(job, job.payloads, block, count, scratch, &coder);
        done = count / kTile * kTile;
        float* out = static_cast<float*>(job.out) + start;
        Dequantize(coder, codes, 0, done, FinishSink<V>{out, V::Set(job.scale)});
        if (done == count) continue;
      }
      memset(scratch.x + done, 0, static_cast<size_t>(count - done + kTile) * sizeof(float));
      for (int32_t k = 0; k < job.count; ++k) {
        const uint8_t* payload = job.payloads + k * job.stride;
        const T* codes = Open(job, payload, block, count, scratch, &coder);
        Add(job, coder, codes, done, count, scratch, scratch.x);
      }
      Finish<V>(job, scratch.x + done, count - done, start + done);
    }
  }

  static void Run(const DecodeJob& job, int64_t first, int64_t last, const Scratch& scratch,
                  uint64_t* checksums) {
    const int64_t step = BlocksPerRun(job.layout);
    for (int64_t next; first < last; first = next) {
      next = first + step < last ? first + step : last;
      // Before decoding: it brings the codes into the cache.
      for (int32_t k = 0; k < job.count; ++k) {
        const uint8_t* payload = job.payloads + k * job.stride;
        checksums[k] += BlocksChecksum<V>(*job.spec, job.layout, payload, first, next);
      }
      Sum(job, first, next, scratch);
    }
  }
};

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CPU_DECODE_BLOCKS_H_
