// Sixteen lanes in two AVX2 registers; simd/plain.h says what each function means.
#ifndef HVDC_SIMD_AVX2_H_
#define HVDC_SIMD_AVX2_H_

#include <immintrin.h>
#include <string.h>

#include "codec/macros.h"
#include "codec/types.h"

namespace hvdc {
namespace HVDC_ARCH {

// Orders of the bytes of eight shorts, by eight-bit masks: for each lane, the packed value that it
// takes, and the opposite, with the packed values in the highest lanes.
struct Orders {
  alignas(16) uint8_t expand[256][16], compress[256][16];
  constexpr Orders() : expand(), compress() {
    for (unsigned mask = 0; mask < 256; ++mask) {
      unsigned packed = 0;
      for (unsigned lane = 0; lane < 8; ++lane) {
        Set(expand[mask], lane, packed);
        if (mask >> lane & 1 && packed < 7) ++packed;
      }
      unsigned place = 8;
      for (unsigned lane = 8; lane--;) {
        if (mask >> lane & 1) Set(compress[mask], --place, lane);
      }
    }
  }
  static constexpr void Set(uint8_t* bytes, unsigned to, unsigned from) {
    bytes[2 * to] = static_cast<uint8_t>(2 * from);
    bytes[2 * to + 1] = static_cast<uint8_t>(2 * from + 1);
  }
};
constexpr Orders kOrders{};

struct Avx2 {
  struct F {
    __m256 a, b;
  };
  struct I {
    __m256i a, b;
  };
  using M = I;  // 0 or all bits a lane
  struct D {
    __m256d v[4];
  };
  struct Wide {  // of every second lane of a half
    __m256i even, odd;
  };
  static constexpr int kWideParts = 2;
  struct Table {
    const float* values;
  };
  static constexpr bool kPermutes = false;
  static constexpr bool kCountsBytes = true;

  // Memory.
  HVDC_HD static F Load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  HVDC_HD static void Store(float* p, F x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
  }
  HVDC_HD static void Stream(float* p, F x) {
    _mm256_stream_ps(p, x.a);
    _mm256_stream_ps(p + 8, x.b);
  }
  HVDC_HD static I LoadBytes(const uint8_t* p) {
    const __m128i bytes = Load128(p);
    return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
  }
  HVDC_HD static I LoadSignedBytes(const uint8_t* p) {
    const __m128i bytes = Load128(p);
    return {_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))};
  }
  HVDC_HD static void StoreBytes(uint8_t* p, I x) {
    const __m256i shorts = Shorts(And(x, SetI(0xFF)));
    const __m128i bytes =
        _mm_packus_epi16(_mm256_castsi256_si128(shorts), _mm256_extracti128_si256(shorts, 1));
    Store128(p, bytes);
  }
  HVDC_HD static I LoadShorts(const uint16_t* p) {
    return {_mm256_cvtepu16_epi32(Load128(p)), _mm256_cvtepu16_epi32(Load128(p + 8))};
  }
  HVDC_HD static void StoreShorts(uint16_t* p, I x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), Shorts(And(x, SetI(0xFFFF))));
  }
  HVDC_HD static void StreamShorts(uint16_t* p, I x) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), Shorts(x));
  }
  HVDC_HD static void FinishStreams() { _mm_sfence(); }
  HVDC_HD static I LoadWords(const void* p) {
    const __m256i* q = static_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
  }
  HVDC_HD static void StoreWords(void* p, I x) {
    __m256i* q = static_cast<__m256i*>(p);
    _mm256_storeu_si256(q, x.a);
    _mm256_storeu_si256(q + 1, x.b);
  }
  HVDC_HD static I Gather(const uint32_t* table, I index) {
    const int* base = reinterpret_cast<const int*>(table);
    return {_mm256_i32gather_epi32(base, index.a, 4), _mm256_i32gather_epi32(base, index.b, 4)};
  }
  HVDC_HD static I Lookup16(I table, I index) {
    return {Lookup8(table, index.a), Lookup8(table, index.b)};
  }
  HVDC_HD static I ExpandShorts(const uint16_t* p, M m) {
    const uint32_t a = Mask8(m.a), b = Mask8(m.b);
    return {ExpandEight(p, a), ExpandEight(p + _mm_popcnt_u32(a), b)};
  }
  HVDC_HD static void CompressShorts(uint16_t* end, I x, M m) {
    const uint32_t a = Mask8(m.a), b = Mask8(m.b);
    const __m256i shorts = Shorts(And(x, SetI(0xFFFF)));
    const __m128i low = _mm256_castsi256_si128(shorts), high = _mm256_extracti128_si256(shorts, 1);
    Store128(end - 8, _mm_shuffle_epi8(high, Load128(kOrders.compress[b])));
    Store128(end - _mm_popcnt_u32(b) - 8, _mm_shuffle_epi8(low, Load128(kOrders.compress[a])));
  }
  HVDC_HD static int CountEqual(const uint8_t* tile, uint8_t byte) {
    const __m256i all = _mm256_set1_epi8(static_cast<char>(byte));
    const I bytes = LoadWords(tile);
    const int a = _mm256_movemask_epi8(_mm256_cmpeq_epi8(bytes.a, all));
    const int b = _mm256_movemask_epi8(_mm256_cmpeq_epi8(bytes.b, all));
    return _mm_popcnt_u32(static_cast<uint32_t>(a)) + _mm_popcnt_u32(static_cast<uint32_t>(b));
  }
  HVDC_HD static Table LoadTable(const float* values) { return {values}; }
  HVDC_HD static F Lookup(const Table& table, I index) {
    return {_mm256_i32gather_ps(table.values, index.a, 4),
            _mm256_i32gather_ps(table.values, index.b, 4)};
  }

  // float32.
  HVDC_HD static F Set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  // The lanes at a distance, of 1, 2, 4 or 8, in each other's place.
  template <int distance>
  HVDC_HD static F SwapLanes(F x) {
    if constexpr (distance == 8) return {x.b, x.a};
    return {SwapEight<distance>(x.a), SwapEight<distance>(x.b)};
  }
  HVDC_HD static I Xor(I x, I y) { return Both<_mm256_xor_si256>(x, y); }
  HVDC_HD static F Add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
  HVDC_HD static F Sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
  HVDC_HD static F Mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
  HVDC_HD static F Div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
  HVDC_HD static F Min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
  HVDC_HD static F Max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
  HVDC_HD static F AddWhere(F x, M m, F y) {
    return {_mm256_add_ps(x.a, _mm256_and_ps(_mm256_castsi256_ps(m.a), y.a)),
            _mm256_add_ps(x.b, _mm256_and_ps(_mm256_castsi256_ps(m.b), y.b))};
  }
  HVDC_HD static F Select(M m, F x, F y) {
    return {_mm256_blendv_ps(y.a, x.a, _mm256_castsi256_ps(m.a)),
            _mm256_blendv_ps(y.b, x.b, _mm256_castsi256_ps(m.b))};
  }
  HVDC_HD static I Bits(F x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
  HVDC_HD static F FromBits(I x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
  HVDC_HD static I Round(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
  HVDC_HD static I Truncate(F x) { return {_mm256_cvttps_epi32(x.a), _mm256_cvttps_epi32(x.b)}; }
  HVDC_HD static F ToFloat(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
  HVDC_HD static I ToHalf(F x) {
    return {_mm256_cvtepu16_epi32(_mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT)),
            _mm256_cvtepu16_epi32(_mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT))};
  }
  HVDC_HD static F FromHalf(I x) {
    const __m256i shorts = Shorts(x);
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(shorts)),
            _mm256_cvtph_ps(_mm256_extracti128_si256(shorts, 1))};
  }
  HVDC_HD static float Fold(F x) {
    const __m256 eight = _mm256_add_ps(x.a, x.b);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }

  // float64.
  HVDC_HD static D ZeroD() {
    const __m256d zero = _mm256_setzero_pd();
    return {{zero, zero, zero, zero}};
  }
  HVDC_HD static D AddWide(D sum, F x) {
    const D wide = Doubles(x);
    for (int i = 0; i < 4; ++i) sum.v[i] = _mm256_add_pd(sum.v[i], wide.v[i]);
    return sum;
  }
  HVDC_HD static D AddWideSquare(D sum, F x) {
    const D wide = Doubles(x);
    for (int i = 0; i < 4; ++i) {
      sum.v[i] = _mm256_add_pd(sum.v[i], _mm256_mul_pd(wide.v[i], wide.v[i]));
    }
    return sum;
  }
  HVDC_HD static double FoldD(D x) {
    const __m256d low = _mm256_add_pd(x.v[0], x.v[2]);
    const __m256d high = _mm256_add_pd(x.v[1], x.v[3]);
    const __m256d four = _mm256_add_pd(low, high);
    const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
    return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
  }

  // 32-bit integers.
  HVDC_HD static I SetI(uint32_t x) {
    const __m256i value = _mm256_set1_epi32(static_cast<int>(x));
    return {value, value};
  }
  HVDC_HD static I LaneNumbers() {
    return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
            _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
  }
  HVDC_HD static I AddI(I x, I y) { return Both<_mm256_add_epi32>(x, y); }
  HVDC_HD static I SubI(I x, I y) { return Both<_mm256_sub_epi32>(x, y); }
  HVDC_HD static I And(I x, I y) { return Both<_mm256_and_si256>(x, y); }
  HVDC_HD static I Or(I x, I y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
  template <int bits>
  HVDC_HD static I ShiftRight(I x) {
    return {_mm256_srli_epi32(x.a, bits), _mm256_srli_epi32(x.b, bits)};
  }
  template <int bits>
  HVDC_HD static I ShiftLeft(I x) {
    return {_mm256_slli_epi32(x.a, bits), _mm256_slli_epi32(x.b, bits)};
  }
  HVDC_HD static I MulLow(I x, I y) { return Both<_mm256_mullo_epi32>(x, y); }
  HVDC_HD static I MinI(I x, I y) { return Both<_mm256_min_epi32>(x, y); }
  HVDC_HD static I MaxI(I x, I y) { return Both<_mm256_max_epi32>(x, y); }
  HVDC_HD static I SelectI(M m, I x, I y) {
    return {_mm256_blendv_epi8(y.a, x.a, m.a), _mm256_blendv_epi8(y.b, x.b, m.b)};
  }
  HVDC_HD static Wide Widen(I x, int part) {
    const __m256i half = part ? x.b : x.a;
    return {half, _mm256_srli_epi64(half, 32)};
  }
  HVDC_HD static I Narrow(const Wide* x) {
    return {_mm256_blend_epi32(x[0].even, _mm256_slli_epi64(x[0].odd, 32), 0xAA),
            _mm256_blend_epi32(x[1].even, _mm256_slli_epi64(x[1].odd, 32), 0xAA)};
  }
  HVDC_HD static Wide Multiply(Wide x, uint32_t factor) {
    const __m256i y = _mm256_set1_epi32(static_cast<int>(factor));
    return {_mm256_mul_epu32(x.even, y), _mm256_mul_epu32(x.odd, y)};
  }
  HVDC_HD static Wide XorHigh(Wide x, Wide y, uint32_t c) {
    const __m256i z = _mm256_set1_epi32(static_cast<int>(c));
    return {XorFour(x.even, y.even, z), XorFour(x.odd, y.odd, z)};
  }
  HVDC_HD static uint32_t LargestLane(I x) {
    const __m256i a = _mm256_max_epi32(x.a, x.b);
    const __m128i b = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    const __m128i c = _mm_max_epi32(b, _mm_shuffle_epi32(b, 0x4E));
    const __m128i d = _mm_max_epi32(c, _mm_shuffle_epi32(c, 0xB1));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(d));
  }

  // Masks.
  HVDC_HD static M Less(F x, F y) {
    return {_mm256_castps_si256(_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
            _mm256_castps_si256(_mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
  }
  HVDC_HD static M GreaterEqual(F x, F y) {
    return {_mm256_castps_si256(_mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ)),
            _mm256_castps_si256(_mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ))};
  }
  HVDC_HD static M LessI(I x, I y) { return Both<_mm256_cmpgt_epi32>(y, x); }
  HVDC_HD static M Not(M m) { return Xor(m, SetI(~0u)); }
  HVDC_HD static int32_t FoldCount(int32_t count) { return count; }
  HVDC_HD static int Count(M m) { return _mm_popcnt_u32(Mask8(m.a)) + _mm_popcnt_u32(Mask8(m.b)); }
  HVDC_HD static I Increment(I x, M m) { return Both<_mm256_sub_epi32>(x, m); }
  HVDC_HD static uint32_t ToMaskBits(M m) {
    const int a = _mm256_movemask_ps(_mm256_castsi256_ps(m.a));
    const int b = _mm256_movemask_ps(_mm256_castsi256_ps(m.b));
    return static_cast<uint32_t>(a | b << 8);
  }
  HVDC_HD static M FromMaskBits(uint32_t bits) {
    const __m256i value = _mm256_set1_epi32(static_cast<int>(bits));
    const __m256i a = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i b = _mm256_slli_epi32(a, 8);
    return {_mm256_cmpeq_epi32(_mm256_and_si256(value, a), a),
            _mm256_cmpeq_epi32(_mm256_and_si256(value, b), b)};
  }

  // Bit planes.
  HVDC_HD static void PackPlanes(const uint8_t* codes, int bits, uint8_t* planes) {
    const I tile = LoadWords(codes);
    for (int bit = 0; bit < bits; ++bit) {
      // The bit to the top of its byte; what comes over from the byte below stays under it.
      const __m128i shift = _mm_cvtsi32_si128(7 - bit);
      const uint32_t a =
          static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_sll_epi16(tile.a, shift)));
      const uint32_t b =
          static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_sll_epi16(tile.b, shift)));
      const uint64_t word = static_cast<uint64_t>(b) << 32 | a;
      memcpy(planes + 8 * bit, &word, 8);
    }
  }
  HVDC_HD static void UnpackPlanes(const uint8_t* planes, int bits, uint8_t* codes) {
    I tile = SetI(0);
    for (int bit = 0; bit < bits; ++bit) {
      uint32_t words[2];
      memcpy(words, planes + 8 * bit, 8);
      const __m256i value = _mm256_set1_epi8(static_cast<char>(1 << bit));
      tile.a = _mm256_or_si256(tile.a, _mm256_and_si256(SpreadBits(words[0]), value));
      tile.b = _mm256_or_si256(tile.b, _mm256_and_si256(SpreadBits(words[1]), value));
    }
    StoreWords(codes, tile);
  }

  // Checksums.
  struct WordSums {
    __m256i weighted, plain;
  };
  HVDC_HD static WordSums ZeroSums() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  HVDC_HD static void AddWords(WordSums* sums, I words, I weights) {
    AddEight(sums, words.a, weights.a);
    AddEight(sums, words.b, weights.b);
  }
  HVDC_HD static uint64_t Weighted(const WordSums& sums) { return Sum64(sums.weighted); }
  HVDC_HD static uint64_t Unweighted(const WordSums& sums) { return Sum64(sums.plain); }

 private:
  template <__m256i (*operation)(__m256i, __m256i)>
  HVDC_HD static I Both(I x, I y) {
    return {operation(x.a, y.a), operation(x.b, y.b)};
  }
  HVDC_HD static uint32_t Mask8(__m256i m) {
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(m)));
  }
  HVDC_HD static __m256i ExpandEight(const uint16_t* p, uint32_t mask) {
    return _mm256_cvtepu16_epi32(_mm_shuffle_epi8(Load128(p), Load128(kOrders.expand[mask])));
  }
  template <int distance>
  HVDC_HD static __m256 SwapEight(__m256 x) {
    if constexpr (distance == 1) return _mm256_permute_ps(x, 0xB1);
    if constexpr (distance == 2) return _mm256_permute_ps(x, 0x4E);
    return _mm256_permute2f128_ps(x, x, 1);
  }
  HVDC_HD static __m256i Lookup8(I table, __m256i index) {
    const __m256 low = _mm256_castsi256_ps(_mm256_permutevar8x32_epi32(table.a, index));
    const __m256 high = _mm256_castsi256_ps(_mm256_permutevar8x32_epi32(table.b, index));
    const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));
    return _mm256_castps_si256(_mm256_blendv_ps(low, high, upper));
  }
  HVDC_HD static __m128i Load128(const void* p) {
    return _mm_loadu_si128(static_cast<const __m128i*>(p));
  }
  HVDC_HD static void Store128(void* p, __m128i x) {
    _mm_storeu_si128(static_cast<__m128i*>(p), x);
  }
  // Lanes below 2**16 as sixteen shorts in order.
  HVDC_HD static __m256i Shorts(I x) {
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(x.a, x.b), 0xD8);
  }
  HVDC_HD static D Doubles(F x) {
    return {{_mm256_cvtps_pd(_mm256_castps256_ps128(x.a)),
             _mm256_cvtps_pd(_mm256_extractf128_ps(x.a, 1)),
             _mm256_cvtps_pd(_mm256_castps256_ps128(x.b)),
             _mm256_cvtps_pd(_mm256_extractf128_ps(x.b, 1))}};
  }
  // The upper halves of x, with two others.
  HVDC_HD static __m256i XorFour(__m256i x, __m256i y, __m256i z) {
    return _mm256_xor_si256(_mm256_xor_si256(y, z), _mm256_shuffle_epi32(x, 0xF5));
  }
  // 32 bits to 32 bytes of all bits or none.
  HVDC_HD static __m256i SpreadBits(uint32_t bits) {
    const __m256i order = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2,
                                           2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
    const __m256i each = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201ull));
    const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(bits)), order);
    return _mm256_cmpeq_epi8(_mm256_and_si256(spread, each), each);
  }
  HVDC_HD static void AddEight(WordSums* sums, __m256i words, __m256i weights) {
    const __m256i odd = _mm256_srli_epi64(words, 32);
    const __m256i even = _mm256_and_si256(words, _mm256_set1_epi64x(0xFFFFFFFF));
    const __m256i products = _mm256_add_epi64(
        _mm256_mul_epu32(words, weights), _mm256_mul_epu32(odd, _mm256_srli_epi64(weights, 32)));
    sums->weighted = _mm256_add_epi64(sums->weighted, products);
    sums->plain = _mm256_add_epi64(sums->plain, _mm256_add_epi64(even, odd));
  }
  HVDC_HD static uint64_t Sum64(__m256i x) {
    const __m128i two = _mm_add_epi64(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    const __m128i one = _mm_add_epi64(two, _mm_unpackhi_epi64(two, two));
    return static_cast<uint64_t>(_mm_cvtsi128_si64(one));
  }
};

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_SIMD_AVX2_H_
