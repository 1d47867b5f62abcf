// Plain data that the codecs' mathematics and the loops around it pass to each other.
#ifndef HVDC_CODEC_TYPES_H_
#define HVDC_CODEC_TYPES_H_

#include <stdint.h>

#include "hvdc.h"

namespace hvdc {

constexpr int kLanes = 16;        // independent partial sums
constexpr int kTile = 64;         // elements of a tile of noise and of bit planes
constexpr int kChunk = 2048;      // elements that one set of lanes adds up
constexpr int kRowChunk = 128;    // rows of a matrix that one partial column sum adds up
constexpr int kPackBlock = 2560;  // elements packed together where groups are not contiguous
constexpr int kMaxGroup = 65536;
constexpr int kPhiloxRounds = 7;

constexpr uint32_t kInfinityBits = 0x7F800000u;
constexpr uint32_t kNanBits = 0x7FC00000u;
// The largest norm of a rotated group, of which decoded numbers stay finite.
constexpr float kLargestRotated = 0x1p119f;
constexpr float kTiny = 0x1p-120f;  // groups with a smaller scale are sent as zeros

// The positions of a payload's parts, in bytes from its start.
struct Layout {
  int64_t count;        // elements
  int64_t scales;       // float32 values behind the header
  int64_t block;        // elements that are packed together
  int64_t blocks;       // the last one may be short
  int64_t chunk;        // blocks that are entropy coded together; 1 of plain codes
  int64_t block_bytes;  // the size of a full block's codes
  int64_t last_bytes;   // the size of the last block's codes
  int64_t codes_offset;
  int64_t payload_bytes;
};

// The sums over a group, or over a chunk of one.
struct GroupStats {
  double sum, square;  // the sums of the elements and of their squares
  float lower, upper;  // sums of the elements below zero, and of the others
  uint32_t largest;    // the largest absolute value's bits: from kInfinityBits on, not finite
  int32_t above;       // elements that are not below zero
};

// The sums that a codec needs.
enum class StatsKind { kNone, kSides, kLargest, kSquares, kMoments };

// The part of a residual in encoding.
enum class Mode {
  kNone,    // there is none
  kShared,  // alpha = beta: the next residual is the encoded sum, less its decoding
  kGeneral,
};

// The numbers that quantize and dequantize a group.
struct GroupScale {
  float lower, upper;  // 1-bit: the two reconstruction values
  float sent;          // the others: the scale in the payload
  float inverse;       // the factor of elements before they are rounded
  bool finite;         // else the scale is NaN, the codes are blank and the residual stays
  bool kept;           // else the elements are taken for zeros
};

// A tensor's position in the noise, as Philox wants it.
struct NoiseState {
  uint32_t keys[2 * kPhiloxRounds];
  uint32_t tensor, step_low, step_high;
};

// Lookup tables of the 8-bit types that are not linear. The code of |y| is found in one of two
// ways.
//
// A ladder entry is for one range of |y|, named by the top bits of its float: the low bits of the
// one threshold that it may hold (18 bits), the code below it (7 bits) and the code from it on (7
// bits).
//
// A segment is a run of codes whose magnitudes are evenly spaced, so that slope |y| + offset is
// close to the code and the place within it, in fixed point. Each octave of |y| holds one boundary
// between segments at the most.
struct Int8Tables {
  static constexpr int kShift = 17;      // low bits of a float within a range
  static constexpr int kEntries = 2304;  // room for 36 exponents
  static constexpr int kOctaves = 32;    // up to 2
  static constexpr int kSegments = 16;
  static constexpr int kFraction = 14;  // bits of a place behind the point
  float magnitudes[128];
  uint32_t ladder[kEntries];
  uint32_t first, last;         // ranges that the ladder covers; outside, the nearest one holds
  uint32_t zero;                // the code of +0
  uint32_t least, most;         // bits of the |y| that others are set to
  uint32_t boundary[kOctaves];  // bits of the threshold that begins a segment
  uint32_t segment[kOctaves];   // the segment before it
  float slope[kSegments], offset[kSegments];
  uint32_t end[kSegments];  // the middle of the last code
};

}  // namespace hvdc

#endif  // HVDC_CODEC_TYPES_H_
