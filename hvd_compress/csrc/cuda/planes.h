// Bit planes, made and taken apart by eight neighbouring threads, which have the 32 elements of
// half a tile, four each. A thread's four codes become eight nibbles, one a plane; the threads
// exchange nibbles until each has its plane's word.
//
// All threads of a warp call these functions together.
#ifndef HVDC_CUDA_PLANES_H_
#define HVDC_CUDA_PLANES_H_

#include "cuda/grid.h"

namespace hvdc {
namespace HVDC_ARCH {

constexpr uint32_t kHalfTile = 8;  // threads

__device__ inline uint32_t PlaceInHalfTile() { return threadIdx.x % kHalfTile; }

// Exchanges the bits of a word whose places differ by shift, where mask has the lower ones.
template <int shift, uint32_t mask>
__device__ inline uint32_t SwapBits(uint32_t x) {
  const uint32_t differ = (x >> shift ^ x) & mask;
  return x ^ differ ^ differ << shift;
}

// Bit b of byte k to bit k of nibble b: the five bits of a place are rotated, two swapped at a
// time.
__device__ inline uint32_t BytesToNibbles(uint32_t x) {
  x = SwapBits<14, 0x0000CCCCu>(x);
  x = SwapBits<7, 0x00AA00AAu>(x);
  x = SwapBits<12, 0x0000F0F0u>(x);
  return SwapBits<4, 0x00F000F0u>(x);
}

__device__ inline uint32_t NibblesToBytes(uint32_t x) {
  x = SwapBits<4, 0x00F000F0u>(x);
  x = SwapBits<12, 0x0000F0F0u>(x);
  x = SwapBits<7, 0x00AA00AAu>(x);
  return SwapBits<14, 0x0000CCCCu>(x);
}

// Nibble p of the thread in place b for nibble b of the thread in place p. In each of three steps,
// the blocks off the diagonal change places: of two bytes, of one, and of a nibble.
__device__ inline uint32_t TransposeNibbles(uint32_t x) {
  const uint32_t place = PlaceInHalfTile();
  uint32_t got = __shfl_xor_sync(kFullWarp, x, 4, kHalfTile);
  x = __byte_perm(x, got, place & 4 ? 0x3276 : 0x5410);
  got = __shfl_xor_sync(kFullWarp, x, 2, kHalfTile);
  x = __byte_perm(x, got, place & 2 ? 0x3715 : 0x6240);
  got = __shfl_xor_sync(kFullWarp, x, 1, kHalfTile);
  const uint32_t own = place & 1 ? 0xF0F0F0F0u : 0x0F0F0F0Fu;
  return (x & own) | (__funnelshift_l(got, got, place & 1 ? 28 : 4) & ~own);
}

// Four codes of a byte each in every thread: the word of the plane that has the thread's place.
__device__ inline uint32_t PlaneOfCodes(uint32_t bytes) {
  return TransposeNibbles(BytesToNibbles(bytes));
}

// The inverse; a thread whose place has no plane brings 0.
__device__ inline uint32_t CodesOfPlane(uint32_t word) {
  return NibblesToBytes(TransposeNibbles(word));
}

// The only plane of codes of one bit, of which every thread has four: its word in all threads.
__device__ inline uint32_t PlaneOfBits(uint32_t nibble) {
  uint32_t word = nibble << 4 * PlaceInHalfTile();
#pragma unroll
  for (int width = 1; width < static_cast<int>(kHalfTile); width *= 2) {
    word |= __shfl_xor_sync(kFullWarp, word, width, kHalfTile);
  }
  return word;
}

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CUDA_PLANES_H_
