// One lane a thread: sixteen neighbouring threads of a warp are the sixteen lanes of simd/plain.h,
// which says what each function means. Functions that combine lanes must be called by all threads
// of a warp together; both halves of the warp do the same for themselves.
#ifndef HVDC_SIMD_THREAD_H_
#define HVDC_SIMD_THREAD_H_

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "codec/half.h"
#include "codec/macros.h"
#include "codec/types.h"

namespace hvdc {
namespace HVDC_ARCH {

struct Thread {
  using F = float;
  using I = uint32_t;
  using D = double;
  using M = bool;
  using Wide = uint64_t;
  static constexpr int kWideParts = 1;
  struct Table {
    const float* values;
  };
  static constexpr bool kPermutes = false;

  // Memory: of one element.
  __device__ static F Load(const float* p) { return *p; }
  __device__ static void Store(float* p, F x) { *p = x; }
  __device__ static I LoadShorts(const uint16_t* p) { return *p; }
  __device__ static void StoreShorts(uint16_t* p, I x) { *p = static_cast<uint16_t>(x); }
  __device__ static I Gather(const uint32_t* table, I index) { return table[index]; }
  __device__ static Table LoadTable(const float* values) { return {values}; }
  __device__ static F Lookup(const Table& table, I index) { return table.values[index]; }

  // float32. The intrinsics round each operation by itself, whatever the compiler would fuse.
  __device__ static F Set(float x) { return x; }
  __device__ static F Add(F x, F y) { return __fadd_rn(x, y); }
  __device__ static F Sub(F x, F y) { return __fsub_rn(x, y); }
  __device__ static F Mul(F x, F y) { return __fmul_rn(x, y); }
  __device__ static F Div(F x, F y) { return __fdiv_rn(x, y); }
  __device__ static F Min(F x, F y) { return x < y ? x : y; }
  __device__ static F Max(F x, F y) { return x > y ? x : y; }
  __device__ static F AddWhere(F x, M m, F y) { return m ? Add(x, y) : x; }
  __device__ static F Select(M m, F x, F y) { return m ? x : y; }
  __device__ static I Bits(F x) { return FloatBits(x); }
  __device__ static F FromBits(I x) { return BitsFloat(x); }
  __device__ static I Round(F x) { return static_cast<uint32_t>(__float2int_rn(x)); }
  __device__ static I Truncate(F x) { return static_cast<uint32_t>(__float2int_rz(x)); }
  __device__ static F ToFloat(I x) { return __int2float_rn(static_cast<int32_t>(x)); }
  __device__ static I ToHalf(F x) { return __half_as_ushort(__float2half_rn(x)); }
  __device__ static F FromHalf(I x) {
    return __half2float(__ushort_as_half(static_cast<uint16_t>(x)));
  }
  __device__ static float Fold(F x) {
    for (int width = kLanes / 2; width; width /= 2) x = Add(x, Across(x, width));
    return x;
  }

  // float64.
  __device__ static D ZeroD() { return 0.0; }
  __device__ static D AddD(D x, D y) { return __dadd_rn(x, y); }
  __device__ static D AddWide(D sum, F x) { return AddD(sum, static_cast<double>(x)); }
  __device__ static D AddWideSquare(D sum, F x) {
    return AddD(sum, __dmul_rn(static_cast<double>(x), static_cast<double>(x)));
  }
  __device__ static double FoldD(D x) {
    for (int width = kLanes / 2; width; width /= 2) x = AddD(x, Across(x, width));
    return x;
  }

  // 32-bit integers.
  __device__ static I SetI(uint32_t x) { return x; }
  __device__ static I AddI(I x, I y) { return x + y; }
  __device__ static I SubI(I x, I y) { return x - y; }
  __device__ static I And(I x, I y) { return x & y; }
  __device__ static I Or(I x, I y) { return x | y; }
  template <int bits>
  __device__ static I ShiftRight(I x) {
    return x >> bits;
  }
  template <int bits>
  __device__ static I ShiftLeft(I x) {
    return x << bits;
  }
  __device__ static I MinI(I x, I y) { return LessI(x, y) ? x : y; }
  __device__ static I MaxI(I x, I y) { return LessI(y, x) ? x : y; }
  __device__ static I SelectI(M m, I x, I y) { return m ? x : y; }
  __device__ static Wide Widen(I x, int) { return x; }
  __device__ static I Narrow(const Wide* x) { return static_cast<uint32_t>(*x); }
  __device__ static Wide Multiply(Wide x, uint32_t factor) {
    return static_cast<uint64_t>(static_cast<uint32_t>(x)) * factor;
  }
  __device__ static Wide XorHigh(Wide x, Wide y, uint32_t c) {
    return static_cast<uint32_t>(x >> 32) ^ static_cast<uint32_t>(y) ^ c;
  }
  __device__ static uint32_t LargestLane(I x) {
    for (int width = kLanes / 2; width; width /= 2) x = MaxI(x, Across(x, width));
    return x;
  }

  // Masks.
  __device__ static M Less(F x, F y) { return x < y; }
  __device__ static M GreaterEqual(F x, F y) { return x >= y; }
  __device__ static M LessI(I x, I y) { return static_cast<int32_t>(x) < static_cast<int32_t>(y); }
  __device__ static M Not(M m) { return !m; }
  __device__ static int Count(M m) { return m ? 1 : 0; }
  __device__ static int32_t FoldCount(int32_t count) {
    for (int width = kLanes / 2; width; width /= 2) count += Across(count, width);
    return count;
  }

 private:
  // The value of the lane whose number differs in one bit. In a tree over exchanged values every
  // lane gets the sum that lane 0 would get, for a sum of two does not depend on their order.
  template <class T>
  __device__ static T Across(T x, int width) {
    return __shfl_xor_sync(0xFFFFFFFFu, x, width, kLanes);
  }
};

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_SIMD_THREAD_H_
