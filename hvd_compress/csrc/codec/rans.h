// The entropy code of codes: interleaved range asymmetric numeral systems with a table a payload
// (docs/format.md, "Entropy-coded codes").
#ifndef HVDC_CODEC_RANS_H_
#define HVDC_CODEC_RANS_H_

#include <string.h>

#include "codec/half.h"
#include "codec/layout.h"

namespace hvdc {

constexpr int kRansPrecision = 14;  // frequencies are in units of 2^-14
constexpr uint32_t kRansTotal = 1u << kRansPrecision;
constexpr int kRansWord = 16;  // bits that a state takes in or gives away at a time
constexpr uint32_t kRansLower = 1u << kRansWord;
constexpr int64_t kElementsPerState = 1024;
constexpr int kMaxAlphabet = 256;

// The data of each code for encoding: arrays, so that vectors can be looked up in them.
struct RansEncodeTable {
  // The bits of a float32: half a state times it, rounded down, is the state divided by the code's
  // frequency, or one less.
  uint32_t inverse[kMaxAlphabet];
  // The number of slots of all other codes; from bit kRansPrecision on, the code's own first slot.
  uint32_t slots[kMaxAlphabet];
};

// The data of the codes that occur, for decoding.
struct RansDecodeTable {
  int present;                       // their number
  uint32_t symbol[kMaxAlphabet];     // the codes that occur, in order
  uint32_t frequency[kMaxAlphabet];  // by place in that order
  uint32_t start[kMaxAlphabet];
  // The place by slot; filled where there are more codes than a vector has lanes.
  uint32_t place[kRansTotal];
};

// A chunk's states, and the words that are left of it.
struct RansStream {
  uint32_t states[kLanes];
  const uint16_t* next;
  const uint16_t* end;
  int lanes;
};

namespace HVDC_ARCH {

// The number of states of a chunk of that many elements.
HVDC_HD int RansLanes(int64_t count) {
  int lanes = 1;
  while (lanes < kLanes && count >= 2 * lanes * kElementsPerState) lanes *= 2;
  return lanes;
}

// Bytes from the codes' start to the index, and to the first chunk.
HVDC_HD int64_t RansTableBytes(const hvdc_spec& spec) { return RoundUp(2 * Alphabet(spec), 4); }

HVDC_HD int64_t RansHeadBytes(const hvdc_spec& spec, const Layout& layout) {
  return RansTableBytes(spec) + 4 * (Chunks(layout) - 1);
}

// The length of a payload of a valid size by its header's flags; -1 where it is not possible.
HVDC_HD int64_t PayloadLength(const hvdc_spec& spec, const Layout& layout, uint32_t flags) {
  if (!IsEntropyCoded(spec) || !(flags & kFlagCoded)) return layout.payload_bytes;
  const int64_t length = static_cast<int64_t>(flags >> kLengthShift) * kLengthUnit;
  return length < kHeaderBytes || length > layout.payload_bytes || !layout.count ? -1 : length;
}

// The bytes of a payload whose last chunk ends there; 0 where it stays a plain one.
HVDC_HD int64_t RansLength(const Layout& layout, int64_t end) {
  constexpr int64_t kLimit = int64_t{1} << 32;  // the flags' limit
  const int64_t length = RoundUp(end, kLengthUnit);
  return length < layout.payload_bytes && length < kLimit ? length : 0;
}

// Elements of a chunk.
HVDC_HD int64_t ChunkElements(const Layout& layout, int64_t chunk) {
  const int64_t first = chunk * layout.chunk, next = first + layout.chunk;
  return RangeElements(layout, first, next < layout.blocks ? next : layout.blocks);
}

// The begin and the end of a chunk of an entropy-coded payload of that length, in bytes; begin is
// -1 where it does not fit.
struct ChunkPlace {
  int64_t begin, end;
};

HVDC_HD ChunkPlace FindChunk(const hvdc_spec& spec, const Layout& layout, const uint8_t* payload,
                             int64_t length, int64_t chunk) {
  const uint8_t* const index = payload + layout.codes_offset + RansTableBytes(spec);
  const int64_t chunks = Chunks(layout), origin = layout.codes_offset + RansHeadBytes(spec, layout);
  ChunkPlace place = {origin, length};
  uint32_t words;
  if (chunk) {
    memcpy(&words, index + 4 * (chunk - 1), 4);
    place.begin += int64_t{4} * words;
  }
  if (chunk + 1 < chunks) {
    memcpy(&words, index + 4 * chunk, 4);
    place.end = origin + int64_t{4} * words;
  }
  const int lanes = RansLanes(ChunkElements(layout, chunk));
  if (place.begin + 4 * lanes > place.end || place.end > length) place.begin = -1;
  return place;
}

// Whether table and index of an entropy-coded payload of that length are possible.
inline bool CodesFit(const hvdc_spec& spec, const Layout& layout, const uint8_t* payload,
                     int64_t length) {
  if (length < layout.codes_offset + RansHeadBytes(spec, layout)) return false;
  uint32_t sum = 0;
  for (int c = 0; c < Alphabet(spec); ++c) {
    uint16_t frequency;
    memcpy(&frequency, payload + layout.codes_offset + 2 * c, 2);
    sum += frequency;
  }
  if (sum != kRansTotal) return false;
  for (int64_t chunk = 0; chunk < Chunks(layout); ++chunk) {
    if (FindChunk(spec, layout, payload, length, chunk).begin < 0) return false;
  }
  return true;
}

// The share of kRansTotal of a code that occurs count times among total, before the remainder of
// the roundings goes to the first of the most frequent codes. present: the number of codes that
// occur.
HVDC_HD uint32_t RansShare(uint64_t count, uint64_t total, uint32_t present) {
  return count ? 1 + static_cast<uint32_t>(count * (kRansTotal - present) / total) : 0;
}

// Frequencies with the sum kRansTotal from counts that are not all 0.
inline void RansFrequencies(const uint64_t* counts, int alphabet, uint16_t* frequencies) {
  uint64_t total = 0;
  uint32_t present = 0;
  int most = 0;
  for (int c = 0; c < alphabet; ++c) {
    total += counts[c];
    present += counts[c] > 0;
    if (counts[c] > counts[most]) most = c;
  }
  uint32_t left = kRansTotal;
  for (int c = 0; c < alphabet; ++c) {
    const uint32_t share = RansShare(counts[c], total, present);
    frequencies[c] = static_cast<uint16_t>(share);
    left -= share;
  }
  frequencies[most] = static_cast<uint16_t>(frequencies[most] + left);
}

// The table's entry of a code with that frequency, whose slots begin at start.
HVDC_HD void SetRansCode(RansEncodeTable* table, int code, uint32_t frequency, uint32_t start) {
  // Three roundings to 24 bits never make a quotient too large, since it is made smaller by more
  // than they can add. Being below 2^18, it falls short by less than one. A frequency of 1 needs
  // no rounding.
  constexpr float kBelow = 1.0f - 1.0f / (1 << 22);
  float inverse = 0.0f;
  if (frequency == 1) inverse = 2.0f;
  if (frequency > 1) inverse = 2.0f * kBelow / static_cast<float>(frequency);
  table->inverse[code] = FloatBits(inverse);
  table->slots[code] = frequency ? start << kRansPrecision | (kRansTotal - frequency) : 0;
}

inline void MakeRansEncodeTable(const uint16_t* frequencies, int alphabet, RansEncodeTable* table) {
  memset(table, 0, sizeof(*table));
  uint32_t start = 0;
  for (int c = 0; c < alphabet; ++c) {
    SetRansCode(table, c, frequencies[c], start);
    start += frequencies[c];
  }
}

// Makes the table from a payload's frequencies, which have the right sum.
inline void MakeRansDecodeTable(const uint8_t* stored, int alphabet, RansDecodeTable* table) {
  int present = 0;
  uint32_t start = 0;
  for (int c = 0; c < alphabet; ++c) {
    uint16_t f;
    memcpy(&f, stored + 2 * c, 2);
    if (!f) continue;
    table->symbol[present] = static_cast<uint32_t>(c);
    table->frequency[present] = f;
    table->start[present++] = start;
    start += f;
  }
  table->present = present;
  for (int i = present; i < kLanes; ++i) {
    table->symbol[i] = table->frequency[i] = 0;
    table->start[i] = kRansTotal;  // beyond all slots
  }
  if (present <= kLanes) return;
  for (int i = 0; i < present; ++i) {
    uint32_t* const slots = table->place + table->start[i];
    for (uint32_t j = 0; j < table->frequency[i]; ++j) slots[j] = static_cast<uint32_t>(i);
  }
}

// Adds how often each code is among count, which are padded to a tile.
template <class V>
inline void CountCodes(const uint8_t* codes, int64_t count, int alphabet, uint32_t* counts) {
  int64_t i = 0;
  if (V::kCountsBytes && alphabet <= kLanes) {
    uint32_t found[kLanes] = {};
    for (; i + kTile <= count; i += kTile) {
      for (int c = 0; c < alphabet; ++c) {
        found[c] += static_cast<uint32_t>(V::CountEqual(codes + i, static_cast<uint8_t>(c)));
      }
    }
    for (int c = 0; c < alphabet; ++c) counts[c] += found[c];
  }
  for (; i < count; ++i) ++counts[codes[i]];
}

// The steps of states, one state in each lane.
template <class V>
struct RansStep {
  using F = typename V::F;
  using I = typename V::I;
  using M = typename V::M;

  // The number of slots of all other codes.
  HVDC_HD static I Others(I slots) { return V::And(slots, V::SetI(kRansTotal - 1)); }
  // Encoding: whether a state has to give away a word before it takes a code in.
  HVDC_HD static M Full(I x, I slots) {
    const I most = V::SetI(kRansTotal - 1);
    return V::LessI(most, V::AddI(V::template ShiftRight<32 - kRansPrecision>(x), Others(slots)));
  }
  // A state that takes a code in; inverse and slots are the code's in RansEncodeTable.
  HVDC_HD static I Push(I x, F inverse, I slots) {
    const I others = Others(slots), start = V::template ShiftRight<kRansPrecision>(slots);
    const I quotient = V::Truncate(V::Mul(V::ToFloat(V::template ShiftRight<1>(x)), inverse));
    const I sum = V::AddI(x, V::MulLow(quotient, others));
    const I rest = V::SubI(sum, V::template ShiftLeft<kRansPrecision>(quotient));
    const M less = V::LessI(V::SetI(kRansTotal - 1), V::AddI(rest, others));
    const I next = V::AddI(sum, start);
    return V::SelectI(less, V::AddI(next, others), next);
  }
  // Decoding: a state that gives away the code to which its slot belongs.
  HVDC_HD static I Pull(I x, I slot, I frequency, I start) {
    const I y = V::MulLow(frequency, V::template ShiftRight<kRansPrecision>(x));
    return V::AddI(y, V::SubI(slot, start));
  }
  // Decoding: whether a state then takes a word in.
  HVDC_HD static M Low(I x) { return V::LessI(V::template ShiftRight<kRansWord>(x), V::SetI(1)); }
  HVDC_HD static I TakeWord(I x, I word) {
    return V::Or(V::template ShiftLeft<kRansWord>(x), word);
  }
};

// Chunks of one size, encoded side by side, each from its last code to its first.
template <class V, int kChunks>
class RansEncoder {
  using I = typename V::I;
  using M = typename V::M;
  using Step = RansStep<V>;

 public:
  // ends: where each chunk's words end; before, room for as many as there are codes, and sixteen
  // more.
  RansEncoder(const RansEncodeTable& table, int alphabet, int lanes, uint16_t* const* ends)
      : table_(table), lanes_(lanes), small_(alphabet <= kLanes) {
    for (int k = 0; k < kChunks; ++k) {
      states_[k] = V::SetI(kRansLower);
      words_[k] = ends[k];
    }
  }

  // The last count codes of each chunk that have not been encoded: whole rows of lanes but for the
  // first call. Reads sixteen codes from every row's start on.
  void Encode(const uint8_t* const* codes, int64_t count) {
    const int64_t rest = count % lanes_, whole = count - rest;
    if (rest) Run<false>(codes, whole, count, (1u << rest) - 1);
    if (lanes_ == kLanes) {
      Run<true>(codes, 0, whole, 0xFFFFu);
    } else {
      Run<false>(codes, 0, whole, (1u << lanes_) - 1);
    }
  }

  // The first word of a chunk.
  const uint16_t* words(int chunk) const { return words_[chunk]; }

  // Writes sixteen, of which the first ones count.
  void Store(int chunk, uint32_t* states) const { V::StoreWords(states, states_[chunk]); }

 private:
  template <bool kFull>
  void Run(const uint8_t* const* codes, int64_t first, int64_t last, uint32_t active) {
    if (small_) {
      const I all_inverse = V::LoadWords(table_.inverse), all_slots = V::LoadWords(table_.slots);
      Rows<kFull>(codes, first, last, active, [=](I code, I* inverse, I* slots) {
        *inverse = V::Lookup16(all_inverse, code);
        *slots = V::Lookup16(all_slots, code);
      });
    } else {
      const RansEncodeTable& table = table_;
      Rows<kFull>(codes, first, last, active, [&table](I code, I* inverse, I* slots) {
        *inverse = V::Gather(table.inverse, code);
        *slots = V::Gather(table.slots, code);
      });
    }
  }

  // The rows that begin in [first, last), the last one first.
  template <bool kFull, class Look>
  void Rows(const uint8_t* const* codes, int64_t first, int64_t last, uint32_t active,
            const Look& look) {
    const int64_t step = kFull ? kLanes : lanes_;
    I states[kChunks];
    uint16_t* words[kChunks];
    const uint8_t* from[kChunks];
    for (int k = 0; k < kChunks; ++k) {
      states[k] = states_[k];
      words[k] = words_[k];
      from[k] = codes[k];
    }
    const M used = V::FromMaskBits(active);
    const I none = V::SetI(0);
    for (int64_t i = first + (last - first + step - 1) / step * step; (i -= step) >= first;) {
      for (int k = 0; k < kChunks; ++k) {
        const I x = states[k];
        I code = V::LoadBytes(from[k] + i), inverse, slots;
        if constexpr (!kFull) code = V::SelectI(used, code, none);
        look(code, &inverse, &slots);
        const M full = Step::Full(x, kFull ? slots : V::SelectI(used, slots, none));
        V::CompressShorts(words[k], x, full);
        words[k] -= V::Count(full);
        const I y = V::SelectI(full, V::template ShiftRight<kRansWord>(x), x);
        const I next = Step::Push(y, V::FromBits(inverse), slots);
        states[k] = kFull ? next : V::SelectI(used, next, x);
      }
    }
    for (int k = 0; k < kChunks; ++k) {
      states_[k] = states[k];
      words_[k] = words[k];
    }
  }

  const RansEncodeTable& table_;
  const int lanes_;
  const bool small_;
  I states_[kChunks];
  uint16_t* words_[kChunks];
};

// The next count codes of a stream: all that are left of it, or a multiple of its lanes. Writes up
// to sixteen bytes more. Reads nothing beyond the stream's end, whatever its bytes are.
template <class V>
class RansDecoder {
  using I = typename V::I;
  using M = typename V::M;
  using Step = RansStep<V>;

 public:
  static void Decode(const RansDecodeTable& table, RansStream* stream, int64_t count,
                     uint8_t* codes) {
    const int present = table.present;
    if (present <= 2) return Small<1>(table, stream, count, codes);
    if (present <= 3) return Small<2>(table, stream, count, codes);
    if (present <= 5) return Small<4>(table, stream, count, codes);
    if (present <= 9) return Small<8>(table, stream, count, codes);
    if (present <= kLanes) return Small<kLanes - 1>(table, stream, count, codes);
    Run(stream, count, codes, [&table](I slot, I* symbol, I* frequency, I* start) {
      const I place = V::Gather(table.place, slot);
      *symbol = V::Gather(table.symbol, place);
      *frequency = V::Gather(table.frequency, place);
      *start = V::Gather(table.start, place);
    });
  }

 private:
  // The place is the number of starts, without the first one, that are not above the slot.
  template <int kBounds>
  static void Small(const RansDecodeTable& table, RansStream* stream, int64_t count,
                    uint8_t* codes) {
    const I symbols = V::LoadWords(table.symbol), frequencies = V::LoadWords(table.frequency);
    const I starts = V::LoadWords(table.start);
    I bounds[kBounds];
    HVDC_UNROLL
    for (int i = 0; i < kBounds; ++i) bounds[i] = V::SetI(table.start[i + 1]);
    Run(stream, count, codes, [=, &bounds](I slot, I* symbol, I* frequency, I* start) {
      I place = V::SetI(0);
      HVDC_UNROLL
      for (int i = 0; i < kBounds; ++i) {
        place = V::Increment(place, V::Not(V::LessI(slot, bounds[i])));
      }
      *symbol = V::Lookup16(symbols, place);
      *frequency = V::Lookup16(frequencies, place);
      *start = V::Lookup16(starts, place);
    });
  }

  template <class Look>
  HVDC_HD static void Run(RansStream* stream, int64_t count, uint8_t* codes, const Look& look) {
    const int lanes = stream->lanes;
    const int64_t whole = count / lanes * lanes;
    if (lanes == kLanes) {
      Rows<true>(stream, whole, 0xFFFFu, codes, look);
    } else {
      Rows<false>(stream, whole, (1u << lanes) - 1, codes, look);
    }
    if (whole < count) Rows<false>(stream, 1, (1u << (count - whole)) - 1, codes + whole, look);
  }

  template <bool kFull, class Look>
  HVDC_HD static void Rows(RansStream* stream, int64_t count, uint32_t active, uint8_t* codes,
                           const Look& look) {
    I x = V::LoadWords(stream->states);
    const M used = V::FromMaskBits(active);
    const I slots = V::SetI(kRansTotal - 1);
    const uint16_t* next = stream->next;
    const uint16_t* const end = stream->end;
    const int64_t step = kFull ? kLanes : stream->lanes;
    for (int64_t i = 0; i < count; i += step) {
      const I slot = V::And(x, slots);
      I symbol, frequency, start;
      look(slot, &symbol, &frequency, &start);
      V::StoreBytes(codes + i, symbol);
      I y = Step::Pull(x, slot, frequency, start);
      if constexpr (!kFull) y = V::SelectI(used, y, V::SetI(kRansLower));
      const M low = Step::Low(y);
      I word;
      if (__builtin_expect(end - next >= kLanes, 1)) {
        word = V::ExpandShorts(next, low);
        next += V::Count(low);
      } else {
        uint16_t last[2 * kLanes] = {};
        memcpy(last, next, static_cast<size_t>(end - next) * sizeof(uint16_t));
        word = V::ExpandShorts(last, low);
        const int64_t taken = V::Count(low);
        next += taken < end - next ? taken : end - next;
      }
      y = V::SelectI(low, Step::TakeWord(y, word), y);
      x = kFull ? y : V::SelectI(used, y, x);
    }
    V::StoreWords(stream->states, x);
    stream->next = next;
  }
};

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CODEC_RANS_H_
