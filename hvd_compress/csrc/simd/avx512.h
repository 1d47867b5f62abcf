// Sixteen lanes in one AVX-512 register; simd/plain.h says what each function means.
#ifndef HVDC_SIMD_AVX512_H_
#define HVDC_SIMD_AVX512_H_

#include <immintrin.h>
#include <string.h>

#include "codec/macros.h"
#include "codec/types.h"

namespace hvdc {
namespace HVDC_ARCH {

struct Avx512 {
  using F = __m512;
  using I = __m512i;
  using M = __mmask16;
  struct D {
    __m512d low, high;
  };
  struct Wide {  // of every second lane
    __m512i even, odd;
  };
  static constexpr int kWideParts = 1;
  struct Table {
    __m512 part[8];
  };
  struct Table32 {
    __m512i part[2];
  };
  static constexpr bool kPermutes = true;
  static constexpr bool kCountsBytes = true;

  // Memory.
  HVDC_HD static F Load(const float* p) { return _mm512_loadu_ps(p); }
  HVDC_HD static void Store(float* p, F x) { _mm512_storeu_ps(p, x); }
  HVDC_HD static void Stream(float* p, F x) { _mm512_stream_ps(p, x); }
  HVDC_HD static I LoadBytes(const uint8_t* p) { return _mm512_cvtepu8_epi32(Load128(p)); }
  HVDC_HD static I LoadSignedBytes(const uint8_t* p) { return _mm512_cvtepi8_epi32(Load128(p)); }
  HVDC_HD static void StoreBytes(uint8_t* p, I x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
  }
  HVDC_HD static I LoadShorts(const uint16_t* p) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  HVDC_HD static void StoreShorts(uint16_t* p, I x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x));
  }
  HVDC_HD static void StreamShorts(uint16_t* p, I x) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x));
  }
  HVDC_HD static void FinishStreams() { _mm_sfence(); }
  HVDC_HD static I LoadWords(const void* p) { return _mm512_loadu_si512(p); }
  HVDC_HD static void StoreWords(void* p, I x) { _mm512_storeu_si512(p, x); }
  HVDC_HD static I Gather(const uint32_t* table, I index) {
    return _mm512_i32gather_epi32(index, table, 4);
  }
  HVDC_HD static Table LoadTable(const float* values) {
    Table table;
    for (int i = 0; i < 8; ++i) table.part[i] = Load(values + kLanes * i);
    return table;
  }
  HVDC_HD static F Lookup(const Table& table, I index) {
    const M bit5 = _mm512_test_epi32_mask(index, SetI(32));
    const M bit6 = _mm512_test_epi32_mask(index, SetI(64));
    const F a = _mm512_permutex2var_ps(table.part[0], index, table.part[1]);
    const F b = _mm512_permutex2var_ps(table.part[2], index, table.part[3]);
    const F c = _mm512_permutex2var_ps(table.part[4], index, table.part[5]);
    const F d = _mm512_permutex2var_ps(table.part[6], index, table.part[7]);
    return Select(bit6, Select(bit5, d, c), Select(bit5, b, a));
  }
  HVDC_HD static Table32 LoadTable32(const void* values) {
    const char* bytes = static_cast<const char*>(values);
    return {{LoadWords(bytes), LoadWords(bytes + sizeof(I))}};
  }
  // Only the lowest bits of the index count.
  HVDC_HD static I Lookup16(I table, I index) { return _mm512_permutexvar_epi32(index, table); }
  HVDC_HD static I ExpandShorts(const uint16_t* p, M m) {
    return _mm512_maskz_expand_epi32(m, LoadShorts(p));
  }
  HVDC_HD static void CompressShorts(uint16_t* end, I x, M m) {
    const __m256i lanes = _mm256_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m256i from = _mm256_add_epi16(lanes, _mm256_set1_epi16(static_cast<short>(Count(m))));
    const __m256i packed = _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(m, x));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(end - kLanes),
                        _mm256_permutexvar_epi16(from, packed));
  }
  HVDC_HD static int CountEqual(const uint8_t* tile, uint8_t byte) {
    const __mmask64 equal =
        _mm512_cmpeq_epi8_mask(_mm512_loadu_si512(tile), _mm512_set1_epi8(static_cast<char>(byte)));
    return static_cast<int>(_mm_popcnt_u64(equal));
  }
  HVDC_HD static I Lookup32(const Table32& table, I index) {
    return _mm512_permutex2var_epi32(table.part[0], index, table.part[1]);
  }

  // float32.
  HVDC_HD static F Set(float x) { return _mm512_set1_ps(x); }
  // The lanes at a distance, of 1, 2, 4 or 8, in each other's place.
  template <int distance>
  HVDC_HD static F SwapLanes(F x) {
    if constexpr (distance == 1) return _mm512_permute_ps(x, 0xB1);
    if constexpr (distance == 2) return _mm512_permute_ps(x, 0x4E);
    return _mm512_shuffle_f32x4(x, x, distance == 4 ? 0xB1 : 0x4E);
  }
  HVDC_HD static I Xor(I a, I b) { return _mm512_xor_si512(a, b); }
  HVDC_HD static F Add(F a, F b) { return _mm512_add_ps(a, b); }
  HVDC_HD static F Sub(F a, F b) { return _mm512_sub_ps(a, b); }
  HVDC_HD static F Mul(F a, F b) { return _mm512_mul_ps(a, b); }
  HVDC_HD static F Div(F a, F b) { return _mm512_div_ps(a, b); }
  // Rounded once: for what is not a result.
  HVDC_HD static F FusedMulAdd(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  HVDC_HD static F Min(F a, F b) { return _mm512_min_ps(a, b); }
  HVDC_HD static F Max(F a, F b) { return _mm512_max_ps(a, b); }
  HVDC_HD static F AddWhere(F a, M m, F b) { return _mm512_mask_add_ps(a, m, a, b); }
  HVDC_HD static F Select(M m, F a, F b) { return _mm512_mask_blend_ps(m, b, a); }
  HVDC_HD static I Bits(F x) { return _mm512_castps_si512(x); }
  HVDC_HD static F FromBits(I x) { return _mm512_castsi512_ps(x); }
  HVDC_HD static I Round(F x) { return _mm512_cvtps_epi32(x); }
  HVDC_HD static I Truncate(F x) { return _mm512_cvttps_epi32(x); }
  HVDC_HD static F ToFloat(I x) { return _mm512_cvtepi32_ps(x); }
  HVDC_HD static I ToHalf(F x) {
    return _mm512_cvtepu16_epi32(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  HVDC_HD static F FromHalf(I x) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(x)); }
  HVDC_HD static float Fold(F x) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }

  // float64.
  HVDC_HD static D ZeroD() { return {_mm512_setzero_pd(), _mm512_setzero_pd()}; }
  HVDC_HD static D AddWide(D a, F x) {
    const D wide = Doubles(x);
    return {_mm512_add_pd(a.low, wide.low), _mm512_add_pd(a.high, wide.high)};
  }
  HVDC_HD static D AddWideSquare(D a, F x) {
    const D wide = Doubles(x);
    return {_mm512_add_pd(a.low, _mm512_mul_pd(wide.low, wide.low)),
            _mm512_add_pd(a.high, _mm512_mul_pd(wide.high, wide.high))};
  }
  HVDC_HD static double FoldD(D x) {
    const __m512d eight = _mm512_add_pd(x.low, x.high);
    const __m256d four =
        _mm256_add_pd(_mm512_castpd512_pd256(eight), _mm512_extractf64x4_pd(eight, 1));
    const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
    return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
  }

  // 32-bit integers.
  HVDC_HD static I SetI(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
  HVDC_HD static I LaneNumbers() {
    return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  }
  HVDC_HD static I AddI(I a, I b) { return _mm512_add_epi32(a, b); }
  HVDC_HD static I SubI(I a, I b) { return _mm512_sub_epi32(a, b); }
  HVDC_HD static I And(I a, I b) { return _mm512_and_si512(a, b); }
  HVDC_HD static I Or(I a, I b) { return _mm512_or_si512(a, b); }
  template <int bits>
  HVDC_HD static I ShiftRight(I a) {
    return _mm512_srli_epi32(a, bits);
  }
  template <int bits>
  HVDC_HD static I ShiftLeft(I a) {
    return _mm512_slli_epi32(a, bits);
  }
  HVDC_HD static I MulLow(I a, I b) { return _mm512_mullo_epi32(a, b); }
  HVDC_HD static I MinI(I a, I b) { return _mm512_min_epi32(a, b); }
  HVDC_HD static I MaxI(I a, I b) { return _mm512_max_epi32(a, b); }
  HVDC_HD static I SelectI(M m, I a, I b) { return _mm512_mask_blend_epi32(m, b, a); }
  HVDC_HD static Wide Widen(I x, int) { return {x, _mm512_srli_epi64(x, 32)}; }
  HVDC_HD static I Narrow(const Wide* x) {
    return _mm512_mask_shuffle_epi32(x->even, 0xAAAA, x->odd, kLowHalves);
  }
  HVDC_HD static Wide Multiply(Wide a, uint32_t b) {
    return {_mm512_mul_epu32(a.even, SetI(b)), _mm512_mul_epu32(a.odd, SetI(b))};
  }
  HVDC_HD static Wide XorHigh(Wide a, Wide b, uint32_t c) {
    return {XorEight(a.even, b.even, SetI(c)), XorEight(a.odd, b.odd, SetI(c))};
  }
  HVDC_HD static uint32_t LargestLane(I x) {
    const __m256i a = _mm256_max_epi32(_mm512_castsi512_si256(x), _mm512_extracti32x8_epi32(x, 1));
    const __m128i b = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    const __m128i c = _mm_max_epi32(b, _mm_shuffle_epi32(b, 0x4E));
    const __m128i d = _mm_max_epi32(c, _mm_shuffle_epi32(c, 0xB1));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(d));
  }

  // Masks.
  HVDC_HD static M Less(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
  HVDC_HD static M GreaterEqual(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
  HVDC_HD static M LessI(I a, I b) { return _mm512_cmplt_epi32_mask(a, b); }
  HVDC_HD static M NoneOf(I a, uint32_t bits) { return _mm512_testn_epi32_mask(a, SetI(bits)); }
  HVDC_HD static M Not(M m) { return _knot_mask16(m); }
  HVDC_HD static int32_t FoldCount(int32_t count) { return count; }
  HVDC_HD static int Count(M m) { return _mm_popcnt_u32(m); }
  HVDC_HD static I Increment(I a, M m) { return _mm512_mask_add_epi32(a, m, a, SetI(1)); }
  HVDC_HD static uint32_t ToMaskBits(M m) { return m; }
  HVDC_HD static M FromMaskBits(uint32_t bits) { return static_cast<M>(bits); }

  // Bit planes.
  HVDC_HD static void PackPlanes(const uint8_t* codes, int bits, uint8_t* planes) {
    const __m512i tile = _mm512_loadu_si512(codes);
    for (int bit = 0; bit < bits; ++bit) {
      const uint64_t word = _mm512_test_epi8_mask(tile, _mm512_set1_epi8(Bit(bit)));
      memcpy(planes + 8 * bit, &word, 8);
    }
  }
  HVDC_HD static void UnpackPlanes(const uint8_t* planes, int bits, uint8_t* codes) {
    __m512i tile = _mm512_setzero_si512();
    for (int bit = 0; bit < bits; ++bit) {
      uint64_t word;
      memcpy(&word, planes + 8 * bit, 8);
      tile = _mm512_mask_add_epi8(tile, word, tile, _mm512_set1_epi8(Bit(bit)));
    }
    _mm512_storeu_si512(codes, tile);
  }

  // Checksums.
  struct WordSums {
    __m512i weighted, plain;
  };
  HVDC_HD static WordSums ZeroSums() { return {_mm512_setzero_si512(), _mm512_setzero_si512()}; }
  HVDC_HD static void AddWords(WordSums* sums, I words, I weights) {
    const I odd = _mm512_srli_epi64(words, 32);
    const I even = _mm512_and_si512(words, _mm512_set1_epi64(0xFFFFFFFF));
    const I products = _mm512_add_epi64(_mm512_mul_epu32(words, weights),
                                        _mm512_mul_epu32(odd, _mm512_srli_epi64(weights, 32)));
    sums->weighted = _mm512_add_epi64(sums->weighted, products);
    sums->plain = _mm512_add_epi64(sums->plain, _mm512_add_epi64(even, odd));
  }
  HVDC_HD static uint64_t Weighted(const WordSums& sums) { return Sum64(sums.weighted); }
  HVDC_HD static uint64_t Unweighted(const WordSums& sums) { return Sum64(sums.plain); }

 private:
  static constexpr _MM_PERM_ENUM kLowHalves = static_cast<_MM_PERM_ENUM>(0xA0);
  // The upper halves of a, by a shuffle, which takes half as long as a shift, with two others.
  HVDC_HD static I XorEight(I a, I b, I c) {
    constexpr _MM_PERM_ENUM kHighHalves = static_cast<_MM_PERM_ENUM>(0xF5);
    return _mm512_ternarylogic_epi32(_mm512_shuffle_epi32(a, kHighHalves), b, c, 0x96);
  }
  HVDC_HD static char Bit(int bit) { return static_cast<char>(1 << bit); }
  HVDC_HD static __m128i Load128(const uint8_t* p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  }
  HVDC_HD static D Doubles(F x) {
    return {_mm512_cvtps_pd(_mm512_castps512_ps256(x)),
            _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1))};
  }
  HVDC_HD static uint64_t Sum64(__m512i x) {
    // Not _mm512_reduce_add_epi64: gcc's last addition is signed, and checksums overflow it.
    uint64_t lanes[8], sum = 0;
    _mm512_storeu_si512(lanes, x);
    for (const uint64_t lane : lanes) sum += lane;
    return sum;
  }
};

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_SIMD_AVX512_H_
