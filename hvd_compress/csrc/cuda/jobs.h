// Jobs, which kernels work on, and the workspace of each.
#ifndef HVDC_CUDA_JOBS_H_
#define HVDC_CUDA_JOBS_H_

#include "codec/layout.h"
#include "hvdc_cuda.h"

namespace hvdc {

constexpr int kWarpSize = 32;
constexpr int kWarps = 4;  // of a block of threads
constexpr int kThreads = kWarps * kWarpSize;
constexpr uint32_t kFullWarp = 0xFFFFFFFFu;

constexpr uint32_t kHeldGroup = 4096;  // the largest group that is held in shared memory

// A pointer to the device's own memory. A compiler that finds a plain pointer in shared memory does
// not know where it points, and has to expect that it is to shared memory as well.
template <class T>
struct DevicePointer {
  DevicePointer() = default;
  HVDC_HD DevicePointer(T* pointer) : value(pointer) {}
  HVDC_HD operator T*() const {
#if defined(__CUDA_ARCH__)
    __builtin_assume(__isGlobal(value));
#endif
    return value;
  }
  HVDC_HD T* operator->() const { return *this; }
  template <class U>
  HVDC_HD U* As() const {
    return reinterpret_cast<U*>(static_cast<T*>(*this));
  }

  T* value;
};

// Messages among the blocks of one kernel; zeros between calls.
struct Control {
  unsigned long long checksum;
  uint32_t tickets;    // blocks that are done
  uint32_t nonfinite;  // whether a scale, or what a cast decodes to, is not finite
  uint32_t wrong;      // payloads from the first on whose indices no encoder writes
};

// Messages among the decoding jobs of a call; zeros between calls.
struct Verdict {
  unsigned long long
      worst;      // the complement of a number that is least for the first altered payload
  uint32_t done;  // jobs whose payloads have been looked at
};

// A job's memory on the device. Verdict and tables are the same for all jobs of a plan; from scales
// on, parts are as long as the spec asks.
struct Workspace {
  DevicePointer<Control> control;
  DevicePointer<Verdict> verdict;
  DevicePointer<unsigned long long> checksums;  // one a payload; zeros between calls
  DevicePointer<Int8Tables> tables;             // from HVDC_DYNAMIC on
  DevicePointer<GroupScale> scales;             // of groups that are larger than what is held
  DevicePointer<GroupStats> stats;              // of the groups' chunks, group by group
  DevicePointer<GroupStats> folded;             // of 2,048 chunks each, where a group has more
  DevicePointer<float> lower;                   // column sums of kRowChunk rows each
  DevicePointer<float> upper;
  DevicePointer<uint32_t> above;
};

// Numbers below 2^31 are divided by one that many share: a multiplication and a shift on a device.
struct Divider {
  uint32_t inverse, shift;
};

// The payload's blocks in numbers of 32 bits, and words of four bytes, of which it has fewer than
// 2^31.
struct Blocks {
  uint32_t elements;    // of the tensor
  uint32_t size;        // elements of a full block
  uint32_t count;       // blocks
  uint32_t codes;       // the word at which the first one's codes start
  uint32_t words;       // codes of a full block
  uint32_t last_words;  // of the last one, the end of which may be in the middle of a word
  uint32_t planes;      // bits of a code, where bits are packed apart
  Divider by_size, by_words;
};

// The passes in which a spec's groups get their numbers.
struct Passes {
  bool held;       // one pass: the group is held in shared memory
  bool columns;    // sums down the columns
  int64_t rows;    // otherwise: rows of this many elements, of which
  int64_t length;  // each is a group
  int64_t chunks;  // of a row
  int64_t folds;   // of a row's chunks; 0 where they are added up in one go
};

struct EncodeJob {
  hvdc_spec spec;
  Layout layout;
  Blocks blocks;
  Passes passes;
  Workspace workspace;
  NoiseState noise;
  uint32_t step;
  DevicePointer<const void> gradient;
  int dtype;
  Mode mode;
  bool aligned;        // gradient and residuals, to four elements
  int residual_dtype;  // float32, or bfloat16 that is rounded at random
  DevicePointer<const void> residual;
  DevicePointer<void> next_residual;  // the same memory, or none of it
  float alpha, beta;
  DevicePointer<uint8_t> payload;
};

struct DecodeJob {
  hvdc_spec spec;
  Layout layout;
  Blocks blocks;
  Workspace workspace;
  uint32_t step;
  DevicePointer<const uint8_t> payloads;
  int64_t stride;
  int32_t count;
  float scale;
  DevicePointer<void> out;
  int dtype;
  bool aligned;     // out, to four elements
  uint32_t* flags;  // or null
  hvdc_cuda_error* error;
  uint64_t tag;     // of the call
  uint32_t number;  // of this job among those of the call
  uint32_t jobs;    // of the call
};

namespace HVDC_ARCH {

// divisor: at least 2.
HVDC_HD Divider MakeDivider(uint32_t divisor) {
  // If 2^bits >= divisor > 2^(bits - 1), the inverse times 2^(31 + bits), rounded up, fits 32
  // bits, and what rounding adds to a quotient is less than one divisor's part.
  uint32_t bits = 0;
  while (uint64_t{1} << bits < divisor) ++bits;
  const uint64_t one = uint64_t{1} << (31 + bits);
  return {static_cast<uint32_t>((one + divisor - 1) / divisor), bits - 1};
}

HVDC_HD uint32_t Quotient(const Divider& divider, uint32_t number) {
  return static_cast<uint32_t>(static_cast<uint64_t>(number) * divider.inverse >> 32) >>
         divider.shift;
}

// layout: of a payload of fewer than 2^31 words.
HVDC_HD Blocks MakeBlocks(const hvdc_spec& spec, const Layout& layout) {
  Blocks blocks;
  blocks.elements = static_cast<uint32_t>(layout.count);
  blocks.size = static_cast<uint32_t>(layout.block);
  blocks.count = static_cast<uint32_t>(layout.blocks);
  blocks.codes = static_cast<uint32_t>(layout.codes_offset / 4);
  blocks.words = static_cast<uint32_t>(layout.block_bytes / 4);
  blocks.last_words = static_cast<uint32_t>((layout.last_bytes + 3) / 4);
  blocks.planes = spec.codec == HVDC_ECQ ? static_cast<uint32_t>(EcqBits(spec.levels)) : 1;
  blocks.by_size = MakeDivider(blocks.size);
  blocks.by_words = MakeDivider(blocks.words);
  return blocks;
}

HVDC_HD uint32_t CodesOfBlock(const Blocks& blocks, uint32_t block) {
  return blocks.codes + block * blocks.words;
}

HVDC_HD uint32_t WordsOfBlock(const Blocks& blocks, uint32_t block) {
  return block + 1 == blocks.count ? blocks.last_words : blocks.words;
}

HVDC_HD uint32_t ElementsOfBlock(const Blocks& blocks, uint32_t block) {
  const uint32_t rest = blocks.elements - block * blocks.size;
  return rest < blocks.size ? rest : blocks.size;
}

// The index, among its block's codes, of a plane's word with the bits of this element.
HVDC_HD uint32_t PlaneWord(const Blocks& blocks, uint32_t position, uint32_t plane) {
  return 2 * (position / kTile * blocks.planes + plane) + position % kTile / 32;
}

HVDC_HD Passes MakePasses(const hvdc_spec& spec, const Layout& layout) {
  Passes passes = {};
  if (spec.codec == HVDC_TOPK) return passes;  // its kernel does all by itself
  passes.held = IsContiguous(spec) && layout.block <= kHeldGroup;
  passes.columns = !IsCast(spec) && spec.grouping == HVDC_COLUMN;
  if (passes.held || IsCast(spec) || !layout.count) return passes;
  if (passes.columns) {
    passes.chunks = (spec.rows + kRowChunk - 1) / kRowChunk;
    return passes;
  }
  passes.rows = 1;
  passes.length = layout.count;
  if (spec.grouping == HVDC_CONTIGUOUS) {
    passes.rows = layout.blocks;
    passes.length = layout.block;
  } else if (spec.grouping == HVDC_ROW) {
    passes.rows = spec.rows;
    passes.length = spec.columns;
  }
  passes.chunks = (passes.length + kChunk - 1) / kChunk;
  if (passes.chunks > kChunk) passes.folds = (passes.chunks + kChunk - 1) / kChunk;
  return passes;
}

// Memory that is given out part by part; without memory, only counted.
struct Parts {
  template <class T>
  HVDC_HD T* Take(int64_t count, int64_t alignment = 256) {
    used = RoundUp(used, alignment);
    uint8_t* const part = memory ? memory + used : nullptr;
    used += count * static_cast<int64_t>(sizeof(T));
    return reinterpret_cast<T*>(part);
  }

  uint8_t* memory;
  int64_t used;
};

// Takes the memory for one job's sums and scales.
HVDC_HD void TakeScratch(const hvdc_spec& spec, const Passes& passes, Parts* parts,
                         Workspace* workspace) {
  if (passes.columns) {
    const int64_t sums = passes.chunks * spec.columns;
    workspace->lower = parts->Take<float>(sums);
    workspace->upper = parts->Take<float>(sums);
    workspace->above = parts->Take<uint32_t>(sums);
  } else if (passes.rows) {
    if (spec.grouping != HVDC_ROW) workspace->scales = parts->Take<GroupScale>(passes.rows);
    workspace->stats = parts->Take<GroupStats>(passes.rows * passes.chunks);
    workspace->folded = parts->Take<GroupStats>(passes.rows * passes.folds);
  }
}

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CUDA_JOBS_H_
