// The functions of one instruction set's code for the code that is compiled without any: loops over
// ranges of blocks, one call a task.
#ifndef HVDC_CPU_KERNELS_H_
#define HVDC_CPU_KERNELS_H_

#include "codec/rans.h"
#include "codec/types.h"

namespace hvdc {

// Chunks of entropy-coded codes that one thread encodes side by side: each row of a chunk waits for
// the one before, but not for other chunks' rows.
constexpr int kChunksTogether = 2;

// Memory of one thread, all of it aligned to 64 bytes and long enough for the block.
struct Scratch {
  float* x;      // a block of what is encoded, or the sum of what was decoded
  float* kept;   // beta h + g
  float* lower;  // 1-bit by row or column: values of a block's elements
  float* upper;
  uint8_t* codes;  // a byte an element
  // Entropy-coded codes only.
  uint8_t* chunks[kChunksTogether];  // codes of a block of each chunk; the first are codes
  uint32_t* counts;                  // the count of each code in a task
  RansDecodeTable* table;            // of a payload
};

// The data that the tasks of one call share.
struct EncodeJob {
  const hvdc_spec* spec;
  const Int8Tables* tables;
  Layout layout;
  NoiseState noise;
  const void* gradient;
  int dtype;
  Mode mode;
  const char* residual;
  char* next_residual;  // the same memory, or none of it
  int residual_width;   // bytes of a residual: 4 of float32, 2 of bfloat16
  bool stream;          // the next residual does not go through the caches
  float alpha, beta;
  uint8_t* payload;
  uint32_t step;
  GroupScale group;  // where groups are not blocks

  const char* ResidualAt(int64_t element) const { return residual + element * residual_width; }
  char* NextResidualAt(int64_t element) const { return next_residual + element * residual_width; }
};

struct DecodeJob {
  const hvdc_spec* spec;
  const Int8Tables* tables;
  Layout layout;
  const uint8_t* payloads;
  int64_t stride;
  int32_t count;
  uint32_t step;
  float scale;
  void* out;
  int dtype;
};

// A task's contribution to the payload's header.
struct EncodeResult {
  uint64_t checksum;
  bool nonfinite;
};

// A chunk of entropy-coded codes, but not in its payload.
struct EncodedChunk {
  uint16_t* end;  // the end of its words, before which there is room for a word a code, and 16 more
  int64_t words;
  uint32_t states[kLanes];
};

// Sums of a stripe of columns over at most kRowChunk rows.
struct ColumnSums {
  float* lower;
  float* upper;
  uint32_t* above;
};

struct Kernels {
  const char* name;
  // Encodes blocks [first, last), and adds to result.
  void (*encode)(const EncodeJob& job, int64_t first, int64_t last, const Scratch& scratch,
                 EncodeResult* result);
  // Entropy codes count chunks of one size, from number first on, of a payload whose plain codes
  // are in place. count is kChunksTogether at the most.
  void (*encode_chunks)(const EncodeJob& job, const RansEncodeTable& table, int64_t first,
                        int64_t count, const Scratch& scratch, EncodedChunk* chunks);
  // Chunks [first, last) of rows of row_length elements, each row cut into chunks of its own.
  void (*chunk_stats)(const EncodeJob& job, int64_t row_length, int64_t first, int64_t last,
                      const Scratch& scratch, GroupStats* stats);
  // Columns [column, column + width) of rows [row, row + rows). Returns the largest absolute bits.
  uint32_t (*column_stats)(const EncodeJob& job, int64_t row, int64_t rows, int64_t column,
                           int64_t width, const ColumnSums& sums);
  // Decodes blocks [first, last) of all payloads; adds the checksum of their bytes to checksums,
  // but where codes may be entropy coded: then the blocks are whole chunks. Behind the checksums of
  // all payloads, adds the number of each one's blocks that do not decode.
  void (*decode)(const DecodeJob& job, int64_t first, int64_t last, const Scratch& scratch,
                 uint64_t* checksums);
  uint64_t (*checksum)(const uint8_t* payload, int64_t begin, int64_t end);
};

extern const Kernels kPlainKernels;
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;

// The ones in use (cpu/dispatch.cc).
const Kernels& CurrentKernels();

}  // namespace hvdc

#endif  // HVDC_CPU_KERNELS_H_
