// Scratch memory of the threads that work on one call: a few blocks each, never more.
#ifndef HVDC_CPU_SCRATCH_H_
#define HVDC_CPU_SCRATCH_H_

#include <stdlib.h>

#include "cpu/kernels.h"
#include "cpu/thread_pool.h"

namespace hvdc {

// An array that may not have been allocated; nothing in this library throws.
template <class T>
class Buffer {
 public:
  enum class Fill { kZeros, kNone };
  explicit Buffer(int64_t count, Fill fill = Fill::kZeros)
      : data_(static_cast<T*>(Allocate(static_cast<size_t>(count > 0 ? count : 1), fill))) {}
  ~Buffer() { free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  T* data() const { return data_; }
  T& operator[](int64_t i) const { return data_[i]; }
  explicit operator bool() const { return data_ != nullptr; }

 private:
  static void* Allocate(size_t count, Fill fill) {
    return fill == Fill::kZeros ? calloc(count, sizeof(T)) : malloc(count * sizeof(T));
  }

  T* data_;
};

class ScratchSet {
 public:
  // block: the elements in a block; coding: whether any tensor's codes are entropy coded.
  ScratchSet(int64_t block, int threads, bool coding = false)
      : floats_((block + kSlack + 63) / 64 * 64),
        codes_(4 * floats_ * static_cast<int64_t>(sizeof(float))),
        stride_(codes_ + floats_ + (coding ? (kChunksTogether - 1) * floats_ + kCodingBytes : 0)),
        memory_(stride_ * threads + 64, Buffer<uint8_t>::Fill::kNone) {}

  explicit operator bool() const { return static_cast<bool>(memory_); }

  Scratch Of(int worker) const {
    uint8_t* start = memory_.data() + worker * stride_;
    start += (64 - reinterpret_cast<uintptr_t>(start) % 64) % 64;
    float* floats = reinterpret_cast<float*>(start);
    Scratch scratch;
    scratch.x = floats;
    scratch.kept = floats + floats_;
    scratch.lower = floats + 2 * floats_;
    scratch.upper = floats + 3 * floats_;
    scratch.codes = start + codes_;
    for (int k = 0; k < kChunksTogether; ++k) scratch.chunks[k] = scratch.codes + k * floats_;
    uint8_t* const behind = scratch.codes + kChunksTogether * floats_;
    scratch.counts = reinterpret_cast<uint32_t*>(behind);
    scratch.table = reinterpret_cast<RansDecodeTable*>(behind + 4 * kMaxAlphabet);
    return scratch;
  }

 private:
  static constexpr int64_t kSlack = 128;   // for whole tiles past a block's end
  static constexpr int64_t kCodingBytes =  // counts and table
      (4 * kMaxAlphabet + static_cast<int64_t>(sizeof(RansDecodeTable)) + 63) / 64 * 64;
  const int64_t floats_, codes_, stride_;
  const Buffer<uint8_t> memory_;
};

// The number of threads that may work: at least one, and no more than have something to do.
inline int ClampThreads(int threads, int64_t tasks) {
  if (threads > tasks) threads = static_cast<int>(tasks);
  return threads < 1 ? 1 : (threads < kMaxThreads ? threads : kMaxThreads);
}

}  // namespace hvdc

#endif  // HVDC_CPU_SCRATCH_H_
