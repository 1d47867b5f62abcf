// Sixteen lanes in plain C++: what the other implementations of the vector type mean.
#ifndef HVDC_SIMD_PLAIN_H_
#define HVDC_SIMD_PLAIN_H_

#include <string.h>

#include "codec/half.h"
#include "codec/sums.h"

namespace hvdc {
namespace HVDC_ARCH {

#define HVDC_EACH_LANE for (int l = 0; l < kLanes; ++l)
// Returns a new vector with a value for each lane l, or a vector whose lanes have been changed.
#define HVDC_LANES(Vector, value) \
  Vector r;                       \
  HVDC_EACH_LANE r.v[l] = value;  \
  return r
#define HVDC_CHANGE(vector, change)  \
  HVDC_EACH_LANE vector.v[l] change; \
  return vector

struct Plain {
  struct F {
    float v[kLanes];
  };
  struct I {
    uint32_t v[kLanes];
  };
  struct D {
    double v[kLanes];
  };
  struct Wide {
    uint64_t v[kLanes];
  };
  static constexpr int kWideParts = 1;
  struct M {
    uint32_t v[kLanes];
  };  // 0 or all bits
  struct Table {
    const float* values;
  };
  static constexpr bool kPermutes = false;
  // Whether CountEqual, for each of sixteen bytes, is sooner done than a histogram.
  static constexpr bool kCountsBytes = false;

  // Memory.
  HVDC_HD static F Load(const float* p) {
    F r;
    memcpy(r.v, p, sizeof(r.v));
    return r;
  }
  HVDC_HD static void Store(float* p, F x) { memcpy(p, x.v, sizeof(x.v)); }
  // Past the caches, where there is a way; p is aligned to the vector. Other threads may see it
  // once the streams are finished. Shorts are below 2**16.
  HVDC_HD static void Stream(float* p, F x) { Store(p, x); }
  HVDC_HD static I LoadBytes(const uint8_t* p) { HVDC_LANES(I, p[l]); }
  HVDC_HD static I LoadSignedBytes(const uint8_t* p) {
    HVDC_LANES(I, static_cast<uint32_t>(static_cast<int32_t>(static_cast<int8_t>(p[l]))));
  }
  HVDC_HD static void StoreBytes(uint8_t* p, I x) {
    HVDC_EACH_LANE p[l] = static_cast<uint8_t>(x.v[l]);
  }
  HVDC_HD static I LoadShorts(const uint16_t* p) {
    uint16_t shorts[kLanes];
    memcpy(shorts, p, sizeof(shorts));
    I r;
    HVDC_EACH_LANE r.v[l] = shorts[l];
    return r;
  }
  HVDC_HD static void StoreShorts(uint16_t* p, I x) {
    uint16_t shorts[kLanes];
    HVDC_EACH_LANE shorts[l] = static_cast<uint16_t>(x.v[l]);
    memcpy(p, shorts, sizeof(shorts));
  }
  HVDC_HD static void StreamShorts(uint16_t* p, I x) { StoreShorts(p, x); }
  HVDC_HD static void FinishStreams() {}
  HVDC_HD static I LoadWords(const void* p) {
    I r;
    memcpy(r.v, p, sizeof(r.v));
    return r;
  }
  HVDC_HD static void StoreWords(void* p, I x) { memcpy(p, x.v, sizeof(x.v)); }
  HVDC_HD static I Gather(const uint32_t* table, I index) { HVDC_LANES(I, table[index.v[l]]); }
  // table: sixteen numbers; index: below sixteen.
  HVDC_HD static I Lookup16(I table, I index) { HVDC_LANES(I, table.v[index.v[l]]); }
  // The lanes of a mask, in order, get the shorts from p on; others have no meaning. Reads sixteen.
  HVDC_HD static I ExpandShorts(const uint16_t* p, M m) {
    I r;
    HVDC_EACH_LANE {
      r.v[l] = *p;
      p += m.v[l] & 1u;
    }
    return r;
  }
  // The lower halves of a mask's lanes, in order, so that the last one stands right before end;
  // what is written before them has no meaning. Writes up to sixteen shorts.
  HVDC_HD static void CompressShorts(uint16_t* end, I x, M m) {
    for (int l = kLanes - 1; l >= 0; --l) {
      end[-1] = static_cast<uint16_t>(x.v[l]);
      end -= m.v[l] & 1u;
    }
  }
  // The number of bytes of a tile that equal a given one.
  HVDC_HD static int CountEqual(const uint8_t* tile, uint8_t byte) {
    int count = 0;
    for (int e = 0; e < kTile; ++e) count += tile[e] == byte;
    return count;
  }
  HVDC_HD static Table LoadTable(const float* values) { return {values}; }
  HVDC_HD static F Lookup(const Table& table, I index) { HVDC_LANES(F, table.values[index.v[l]]); }

  // float32.
  HVDC_HD static F Set(float x) { HVDC_LANES(F, x); }
  // The lanes at a distance, of 1, 2, 4 or 8, in each other's place.
  template <int distance>
  HVDC_HD static F SwapLanes(F x) {
    HVDC_LANES(F, x.v[l ^ distance]);
  }
  HVDC_HD static I Xor(I a, I b) { HVDC_CHANGE(a, ^= b.v[l]); }
  HVDC_HD static F Add(F a, F b) { HVDC_CHANGE(a, += b.v[l]); }
  HVDC_HD static F Sub(F a, F b) { HVDC_CHANGE(a, -= b.v[l]); }
  HVDC_HD static F Mul(F a, F b) { HVDC_CHANGE(a, *= b.v[l]); }
  HVDC_HD static F Div(F a, F b) { HVDC_CHANGE(a, /= b.v[l]); }
  HVDC_HD static F Min(F a, F b) { HVDC_CHANGE(a, = a.v[l] < b.v[l] ? a.v[l] : b.v[l]); }
  HVDC_HD static F Max(F a, F b) { HVDC_CHANGE(a, = a.v[l] > b.v[l] ? a.v[l] : b.v[l]); }
  HVDC_HD static F AddWhere(F a, M m, F b) { return Add(a, FromBits(And(ToI(m), Bits(b)))); }
  HVDC_HD static F Select(M m, F a, F b) { return FromBits(SelectI(m, Bits(a), Bits(b))); }
  HVDC_HD static I Bits(F x) {
    I r;
    memcpy(r.v, x.v, sizeof(r.v));
    return r;
  }
  HVDC_HD static F FromBits(I x) {
    F r;
    memcpy(r.v, x.v, sizeof(r.v));
    return r;
  }
  // To int32, to nearest with ties to even: from 1.5 * 2**23 on floats are the integers.
  HVDC_HD static I Round(F x) {
    const F magic = Set(12582912.0f);
    return SubI(Bits(Add(x, magic)), Bits(magic));
  }
  HVDC_HD static I Truncate(F x) {
    HVDC_LANES(I, static_cast<uint32_t>(static_cast<int32_t>(x.v[l])));
  }
  HVDC_HD static F ToFloat(I x) { HVDC_LANES(F, static_cast<float>(static_cast<int32_t>(x.v[l]))); }
  HVDC_HD static I ToHalf(F x) { HVDC_LANES(I, FloatToHalf(x.v[l])); }
  HVDC_HD static F FromHalf(I x) { HVDC_LANES(F, HalfToFloat(x.v[l])); }
  HVDC_HD static float Fold(F x) { return FoldLanes(x.v); }
  // The sum of numbers that Count has already added over the lanes.
  HVDC_HD static int32_t FoldCount(int32_t count) { return count; }

  // float64.
  HVDC_HD static D ZeroD() { return {}; }
  HVDC_HD static D AddWide(D a, F x) { HVDC_CHANGE(a, += static_cast<double>(x.v[l])); }
  HVDC_HD static D AddWideSquare(D a, F x) {
    HVDC_CHANGE(a, += static_cast<double>(x.v[l]) * static_cast<double>(x.v[l]));
  }
  HVDC_HD static double FoldD(D x) { return FoldLanes(x.v); }

  // 32-bit integers; comparisons, minimum and maximum are signed.
  HVDC_HD static I SetI(uint32_t x) { HVDC_LANES(I, x); }
  HVDC_HD static I LaneNumbers() { HVDC_LANES(I, static_cast<uint32_t>(l)); }
  HVDC_HD static I AddI(I a, I b) { HVDC_CHANGE(a, += b.v[l]); }
  HVDC_HD static I SubI(I a, I b) { HVDC_CHANGE(a, -= b.v[l]); }
  HVDC_HD static I And(I a, I b) { HVDC_CHANGE(a, &= b.v[l]); }
  HVDC_HD static I Or(I a, I b) { HVDC_CHANGE(a, |= b.v[l]); }
  template <int bits>
  HVDC_HD static I ShiftRight(I a) {
    HVDC_CHANGE(a, >>= bits);
  }
  template <int bits>
  HVDC_HD static I ShiftLeft(I a) {
    HVDC_CHANGE(a, <<= bits);
  }
  // The lower half of a product.
  HVDC_HD static I MulLow(I a, I b) { HVDC_CHANGE(a, *= b.v[l]); }
  HVDC_HD static I MinI(I a, I b) {
    HVDC_CHANGE(a, = Signed(a.v[l]) < Signed(b.v[l]) ? a.v[l] : b.v[l]);
  }
  HVDC_HD static I MaxI(I a, I b) {
    HVDC_CHANGE(a, = Signed(a.v[l]) > Signed(b.v[l]) ? a.v[l] : b.v[l]);
  }
  HVDC_HD static I SelectI(M m, I a, I b) {
    HVDC_CHANGE(a, = (a.v[l] & m.v[l]) | (b.v[l] & ~m.v[l]));
  }
  // Lanes of 64 bits, in kWideParts parts that can be computed one after the other. Narrow and
  // Multiply look at their lower halves alone, XorHigh at the upper ones of a; what it leaves in
  // the upper halves of its result has no meaning.
  HVDC_HD static Wide Widen(I x, int) { HVDC_LANES(Wide, x.v[l]); }
  HVDC_HD static I Narrow(const Wide* x) { HVDC_LANES(I, static_cast<uint32_t>(x->v[l])); }
  HVDC_HD static Wide Multiply(Wide a, uint32_t b) { HVDC_CHANGE(a, = (a.v[l] & 0xFFFFFFFFu) * b); }
  HVDC_HD static Wide XorHigh(Wide a, Wide b, uint32_t c) {
    HVDC_CHANGE(a, = a.v[l] >> 32 ^ b.v[l] ^ c);
  }
  HVDC_HD static uint32_t LargestLane(I x) {
    uint32_t r = x.v[0];
    HVDC_EACH_LANE r = Signed(x.v[l]) > Signed(r) ? x.v[l] : r;
    return r;
  }

  // Masks.
  HVDC_HD static M Less(F a, F b) { HVDC_LANES(M, a.v[l] < b.v[l] ? ~0u : 0u); }
  HVDC_HD static M GreaterEqual(F a, F b) { HVDC_LANES(M, a.v[l] >= b.v[l] ? ~0u : 0u); }
  HVDC_HD static M LessI(I a, I b) { HVDC_LANES(M, Signed(a.v[l]) < Signed(b.v[l]) ? ~0u : 0u); }
  HVDC_HD static M Not(M m) { HVDC_CHANGE(m, = ~m.v[l]); }
  HVDC_HD static int Count(M m) {
    int r = 0;
    HVDC_EACH_LANE r += static_cast<int>(m.v[l] & 1u);
    return r;
  }
  HVDC_HD static I Increment(I a, M m) { HVDC_CHANGE(a, -= m.v[l]); }
  HVDC_HD static uint32_t ToMaskBits(M m) {
    uint32_t r = 0;
    HVDC_EACH_LANE r |= (m.v[l] & 1u) << l;
    return r;
  }
  HVDC_HD static M FromMaskBits(uint32_t bits) { HVDC_LANES(M, 0u - (bits >> l & 1u)); }

  // A tile's codes to bit planes and back.
  HVDC_HD static void PackPlanes(const uint8_t* codes, int bits, uint8_t* planes) {
    for (int bit = 0; bit < bits; ++bit) {
      uint64_t word = 0;
      for (int e = 0; e < kTile; ++e) word |= static_cast<uint64_t>(codes[e] >> bit & 1) << e;
      memcpy(planes + 8 * bit, &word, 8);
    }
  }
  HVDC_HD static void UnpackPlanes(const uint8_t* planes, int bits, uint8_t* codes) {
    uint8_t tile[kTile] = {};
    for (int bit = 0; bit < bits; ++bit) {
      uint64_t word;
      memcpy(&word, planes + 8 * bit, 8);
      for (int e = 0; e < kTile; ++e) tile[e] |= static_cast<uint8_t>((word >> e & 1) << bit);
    }
    memcpy(codes, tile, kTile);
  }

  // Sum of word * weight and sum of word over sixteen words, mod 2**64, added to two totals.
  // Weights are those of the lanes, below 2**32.
  struct WordSums {
    uint64_t weighted, plain;
  };
  HVDC_HD static WordSums ZeroSums() { return {0, 0}; }
  HVDC_HD static void AddWords(WordSums* sums, I words, I weights) {
    HVDC_EACH_LANE {
      sums->weighted += static_cast<uint64_t>(words.v[l]) * weights.v[l];
      sums->plain += words.v[l];
    }
  }
  HVDC_HD static uint64_t Weighted(const WordSums& sums) { return sums.weighted; }
  HVDC_HD static uint64_t Unweighted(const WordSums& sums) { return sums.plain; }

 private:
  HVDC_HD static int32_t Signed(uint32_t x) { return static_cast<int32_t>(x); }
  HVDC_HD static I ToI(M m) {
    I r;
    memcpy(r.v, m.v, sizeof(r.v));
    return r;
  }
};

#undef HVDC_EACH_LANE
#undef HVDC_LANES
#undef HVDC_CHANGE

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_SIMD_PLAIN_H_
