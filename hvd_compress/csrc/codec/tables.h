// The lookup tables of the 8-bit types, from their formulas (docs/format.md, "Magnitudes of int8").
#ifndef HVDC_CODEC_TABLES_H_
#define HVDC_CODEC_TABLES_H_

#include "codec/half.h"
#include "codec/types.h"

namespace hvdc {
namespace HVDC_ARCH {

// The same as _magnitude() in hvd_compress/codecs/int8.py: quotients of integers, rounded once.
HVDC_HD double Int8Magnitude(uint32_t variant, uint32_t code) {
  if (variant >= HVDC_E4M3) {
    const uint32_t mantissa = variant == HVDC_E4M3 ? 3 : 2;
    if (code > (variant == HVDC_E4M3 ? 0x7Eu : 0x7Bu)) {
      return BitsFloat(code == 0x7C ? kInfinityBits : kNanBits);
    }
    const uint32_t normal = code >> mantissa ? 1 : 0, steps = (code >> mantissa) - normal;
    const uint32_t part = (code & ((1u << mantissa) - 1)) + (normal << mantissa);
    return part * BitsFloat((FloatBias(mantissa) + 1 - mantissa + steps) << 23);
  }
  const double powers[] = {1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7};
  uint32_t bits = 4, exponent = code / 16, path = code % 16;
  if (variant == HVDC_MANTISSA) return path / (10 * powers[exponent]);
  if (variant == HVDC_DYNAMIC) {
    if (code < 2) return code;
    for (bits = 0; code >> (bits + 1); ++bits) {
    }
    exponent = 6 - bits;
    path = code - (1u << bits);
  }
  // The first cut of (0.1, 1) leaves (0.1, 0.45) and (0.45, 1): here in twentieths.
  const bool upper = path >> (bits - 1);
  const uint32_t part = path & ((1u << (bits - 1)) - 1);
  const uint32_t low = upper ? 9 : 2, size = upper ? 11 : 7;
  const uint32_t middle = (low << bits) + size * (2 * part + 1);
  return middle / ((20u << bits) * powers[exponent]);
}

HVDC_HD uint32_t Int8Entry(uint32_t threshold, uint32_t below, uint32_t from) {
  return threshold | below << 18 | from << 25;
}

// Whether the codes from order[begin] to order[end] ascend by ones, and their magnitudes evenly.
HVDC_HD bool IsSegment(const uint32_t* order, const float* magnitudes, int begin, int end) {
  const double step = magnitudes[order[begin + 1]] - magnitudes[order[begin]];
  const double last = magnitudes[order[end]] - magnitudes[order[end - 1]];
  const double error = last < step ? step - last : last - step;
  return order[end] == order[end - 1] + 1 && error < 0.001 * step;
}

// The segments of steps codes in ascending order, thresholds[i] standing between the i-th and the
// next.
HVDC_HD void BuildInt8Segments(const uint32_t* order, const uint32_t* thresholds, int steps,
                               Int8Tables* tables) {
  constexpr uint32_t kFirstOctave = 128 - Int8Tables::kOctaves;
  constexpr double kOne = 1 << Int8Tables::kFraction;
  const float* values = tables->magnitudes;
  tables->least = FloatBits(values[order[0]]);
  if (tables->least < kFirstOctave << 23) tables->least = kFirstOctave << 23;
  tables->most = FloatBits(values[order[steps - 1]]);
  uint32_t octave = 0;  // the first one whose boundary is not known
  int segment = 0;
  for (int begin = 0, end; begin < steps; begin = end + 1, ++segment) {
    for (end = begin; end + 1 < steps && IsSegment(order, values, begin, end + 1);) ++end;
    const double low = values[order[begin]], high = values[order[end]];
    const double slope = end > begin ? kOne * (end - begin) / (high - low) : 0.0;
    const double middle = kOne * (order[begin] + 0.5);
    tables->slope[segment] = static_cast<float>(slope);
    tables->offset[segment] = static_cast<float>(middle - low * slope);
    tables->end[segment] = static_cast<uint32_t>(kOne * (order[end] + 0.5));
    const bool more = end + 1 < steps;
    const uint32_t next = more ? (thresholds[end] >> 23) - kFirstOctave : Int8Tables::kOctaves - 1;
    for (; octave <= next; ++octave) {
      tables->boundary[octave] = more && octave == next ? thresholds[end] : 0x7FFFFFFFu;
      tables->segment[octave] = static_cast<uint32_t>(segment);
    }
  }
}

// The tables of a variant from HVDC_DYNAMIC on. Memory that its coder does not read stays as it is.
HVDC_HD void BuildInt8Tables(uint32_t variant, Int8Tables* tables) {
  constexpr uint32_t kNever = 1u << Int8Tables::kShift;  // above all low bits
  for (uint32_t code = 0; code < 128; ++code) {
    tables->magnitudes[code] = static_cast<float>(Int8Magnitude(variant, code));
  }
  tables->zero = 0;
  if (variant >= HVDC_E4M3) return;  // whose codes Narrowing finds
  // Codes by ascending magnitude; of codes with the same one the largest alone.
  const float* values = tables->magnitudes;
  uint32_t order[128];
  int steps = 0;
  for (uint32_t code = 0; code < 128; ++code) {
    int at = 0;
    while (at < steps && values[order[at]] < values[code]) ++at;
    if (at == steps || values[order[at]] != values[code]) {
      for (int i = steps++; i > at; --i) order[i] = order[i - 1];
    }
    order[at] = code;
  }
  uint32_t thresholds[127];
  for (int i = 0; i + 1 < steps; ++i) {
    const double sum = static_cast<double>(values[order[i]]) + values[order[i + 1]];
    thresholds[i] = FloatBits(static_cast<float>(sum / 2));
  }
  tables->zero = order[0];
  tables->first = (thresholds[0] >> Int8Tables::kShift) - 1;
  tables->last = (thresholds[steps - 2] >> Int8Tables::kShift) + 1;
  int step = 0;  // thresholds passed
  for (uint32_t range = tables->first; range <= tables->last; ++range) {
    uint32_t entry = Int8Entry(kNever, order[step], 0);
    if (step + 1 < steps && thresholds[step] >> Int8Tables::kShift == range) {
      entry = Int8Entry(thresholds[step] & (kNever - 1), order[step], order[step + 1]);
      ++step;
    }
    tables->ladder[range - tables->first] = entry;
  }
  BuildInt8Segments(order, thresholds, steps, tables);
}

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CODEC_TABLES_H_
