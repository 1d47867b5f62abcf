// Rotations of groups (hvd_compress/codecs/rotation.py): signs at random, then a Hadamard matrix.
#ifndef HVDC_CPU_ROTATION_H_
#define HVDC_CPU_ROTATION_H_

#include "codec/philox.h"
#include "cpu/kernels.h"

namespace hvdc {
namespace HVDC_ARCH {

// Sums in the lower lane of each pair of lanes at a distance, differences in the upper one.
template <class V, int kDistance>
HVDC_HD typename V::F PairLanes(typename V::F x) {
  constexpr int kBit = kDistance == 1 ? 31 : kDistance == 2 ? 30 : kDistance == 4 ? 29 : 28;
  const typename V::I upper = V::And(V::LaneNumbers(), V::SetI(kDistance));
  const typename V::I minus = V::template ShiftLeft<kBit>(upper);
  return V::Add(V::template SwapLanes<kDistance>(x), V::FromBits(V::Xor(V::Bits(x), minus)));
}

// size elements, a power of two, times a Hadamard matrix over the root of its size.
template <class V>
inline void Transform(float* x, int64_t size) {
  int64_t square = 1;
  float factor = 1.0f;
  for (; 4 * square <= size; square *= 4) factor *= 0.5f;
  if (square != size) factor *= 0x1.6a09e6p-1f;  // the root of a half
  if (size < kLanes) {
    for (int64_t i = 0; i < size; ++i) x[i] *= factor;
  }
  for (int64_t i = 0; i + kLanes <= size; i += kLanes) {
    typename V::F y = V::Mul(V::Load(x + i), V::Set(factor));
    y = PairLanes<V, 1>(y);
    y = PairLanes<V, 2>(y);
    y = PairLanes<V, 4>(y);
    V::Store(x + i, PairLanes<V, 8>(y));
  }
  for (int64_t distance = size < kLanes ? 1 : kLanes; distance < size; distance *= 2) {
    for (int64_t begin = 0; begin < size; begin += 2 * distance) {
      float* const first = x + begin;
      float* const second = first + distance;
      if (distance < kLanes) {
        for (int64_t i = 0; i < distance; ++i) {
          const float a = first[i], b = second[i];
          first[i] = a + b;
          second[i] = a - b;
        }
      }
      for (int64_t i = 0; i + kLanes <= distance; i += kLanes) {
        const typename V::F a = V::Load(first + i), b = V::Load(second + i);
        V::Store(first + i, V::Add(a, b));
        V::Store(second + i, V::Sub(a, b));
      }
    }
  }
}

// A group, whole or in pieces whose sizes are powers of two.
template <class V>
inline void TransformGroup(float* x, int64_t group, int64_t count) {
  for (int64_t size = group; count; size /= 2) {
    if (size > count) continue;
    Transform<V>(x, size);
    x += size;
    count -= size;
  }
}

// Changes the signs of count elements, up to sixteen more.
template <class V>
inline void ChangeSigns(const float* from, float* to, int64_t count) {
  constexpr int64_t kOnce = 128 * kLanes;  // elements that a vector of counters serves
  const NoiseState key = MakeNoise({0, 0xFFFFFFFFu, 0, 0, 0});
  for (int64_t begin = 0; begin < count; begin += kOnce) {
    const uint32_t first = static_cast<uint32_t>(begin / 128);
    typename V::I words[4];
    uint32_t bits[4][kLanes];
    PhiloxWords<V>(key, V::AddI(V::SetI(first), V::LaneNumbers()), words);
    for (int word = 0; word < 4; ++word) V::StoreWords(bits[word], words[word]);
    const int64_t end = begin + kOnce < count ? begin + kOnce : count;
    for (int64_t i = begin; i < end; i += kLanes) {
      const int64_t at = i - begin;
      const typename V::M minus = V::FromMaskBits(bits[at / 32 % 4][at / 128] >> at % 32 & 0xFFFFu);
      const typename V::I sign = V::SelectI(minus, V::SetI(0x80000000u), V::SetI(0));
      V::Store(to + i, V::FromBits(V::Xor(V::Bits(V::Load(from + i)), sign)));
    }
  }
}

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CPU_ROTATION_H_
