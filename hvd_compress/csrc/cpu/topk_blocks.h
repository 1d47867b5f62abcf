// Top-k: the largest elements of a chunk are found, sent and taken from the residual; and added up.
#ifndef HVDC_CPU_TOPK_BLOCKS_H_
#define HVDC_CPU_TOPK_BLOCKS_H_

#include "codec/topk.h"
#include "cpu/blocks.h"
#include "cpu/decode_blocks.h"
#include "cpu/encode_blocks.h"
#include "cpu/prepare.h"

namespace hvdc {
namespace HVDC_ARCH {

// Numbers of up to 32 bits one behind the other, the least significant bit first, in whole words.
class BitWriter {
 public:
  explicit BitWriter(uint8_t* to) : to_(to) {}
  void Put(uint32_t number, int bits) {
    held_ |= static_cast<uint64_t>(number) << count_;
    count_ += bits;
    if (count_ >= 32) Flush();
  }
  void Finish() {
    if (count_) Flush();
  }

 private:
  void Flush() {
    const uint32_t word = static_cast<uint32_t>(held_);
    memcpy(to_, &word, sizeof(word));
    to_ += sizeof(word);
    held_ >>= 32;
    count_ = count_ > 32 ? count_ - 32 : 0;
  }

  uint8_t* to_;
  int count_ = 0;
  uint64_t held_ = 0;
};

class BitReader {
 public:
  explicit BitReader(const uint8_t* from) : from_(from) {}
  uint32_t Take(int bits) {
    if (count_ < bits) {
      uint32_t word;
      memcpy(&word, from_, sizeof(word));
      from_ += sizeof(word);
      held_ |= static_cast<uint64_t>(word) << count_;
      count_ += 32;
    }
    const uint64_t number = held_ & ((uint64_t{1} << bits) - 1);
    held_ >>= bits;
    count_ -= bits;
    return static_cast<uint32_t>(number);
  }

 private:
  const uint8_t* from_;
  int count_ = 0;
  uint64_t held_ = 0;
};

template <class V>
struct TopKEncoder {
  using F = typename V::F;
  using I = typename V::I;

  // The number of magnitudes, of count, that are at least ``least``, which is not 0. Zeros follow
  // them up to a whole vector.
  static int64_t CountFrom(const uint32_t* magnitudes, int64_t count, uint32_t least) {
    const I below = V::SetI(least - 1);
    int64_t found = 0;
    for (int64_t i = 0; i < count; i += kLanes) {
      found += V::Count(V::LessI(below, V::LoadWords(magnitudes + i)));
    }
    return found;
  }

  // Bits between which the magnitude of number keep lies: at least keep elements reach low, and
  // fewer reach high.
  struct Range {
    uint32_t low, high;
  };

  // A range whose low so few elements reach that the rest of the selection is quick, where a few
  // looks at all elements find one. hint: where to look first, such as at the chunk before.
  static Range Narrow(const float* x, int64_t count, uint32_t largest, int64_t keep,
                      uint32_t hint) {
    constexpr uint32_t kOctave = 1u << 23;
    constexpr int kLooks = 16;
    Range range = {0, largest + 1};
    uint32_t step = kOctave;
    for (int look = 0; look < kLooks && range.high - range.low > 1; ++look) {
      uint32_t middle = range.low + (range.high - range.low) / 2;
      if (look == 0 && hint > range.low && hint < range.high) {
        middle = hint;
      } else if (range.low == 0) {
        if (range.high <= step) break;
        middle = range.high - step;
        step *= 2;
      }
      const I below = V::SetI(middle - 1);
      int64_t found = 0, i = 0;
      for (; i + kLanes <= count; i += kLanes) {
        found += V::Count(V::LessI(below, AbsBits<V>(V::Load(x + i))));
      }
      for (; i < count; ++i) found += (FloatBits(x[i]) & 0x7FFFFFFFu) >= middle;
      (found >= keep ? range.low : range.high) = middle;
      if (found >= keep && found <= 4 * keep) break;
    }
    return range;
  }

  // The elements whose magnitude's bits are at least ``least``, in order.
  static int64_t Collect(const float* x, int64_t count, uint32_t least, uint32_t* index,
                         uint32_t* magnitudes) {
    int64_t found = 0, i = 0;
    const auto take = [&](int64_t at) {
      index[found] = static_cast<uint32_t>(at);
      magnitudes[found++] = FloatBits(x[at]) & 0x7FFFFFFFu;
    };
    if (least) {
      const I below = V::SetI(least - 1);
      for (; i + kLanes <= count; i += kLanes) {
        uint32_t mask = V::ToMaskBits(V::LessI(below, AbsBits<V>(V::Load(x + i))));
        for (; mask; mask &= mask - 1) take(i + __builtin_ctz(mask));
      }
    }
    for (; i < count; ++i) {
      if ((FloatBits(x[i]) & 0x7FFFFFFFu) >= least) take(i);
    }
    for (int l = 0; l < kLanes; ++l) magnitudes[found + l] = 0;  // up to a whole vector
    return found;
  }

  // The bits of the magnitude of number keep, the largest first, within a range.
  static uint32_t Threshold(const uint32_t* magnitudes, int64_t count, Range range, int64_t keep) {
    if (range.low == 0) {
      if (CountFrom(magnitudes, count, 1) < keep) return 0;
      range.low = 1;
    }
    while (range.high - range.low > 1) {
      const uint32_t middle = range.low + (range.high - range.low) / 2;
      const int64_t found = CountFrom(magnitudes, count, middle);
      (found >= keep ? range.low : range.high) = middle;
      if (found == keep) break;
    }
    return range.low;
  }

  // Leaves the indices of the keep largest elements at the front of index; of equal elements the
  // first are taken, and none that is 0. Returns how many they are. hint: for Narrow, in this chunk
  // and for the next one.
  static int64_t Select(const float* x, int64_t count, uint32_t largest, int64_t keep,
                        uint32_t* hint, uint32_t* index, uint32_t* magnitudes) {
    const Range range = Narrow(x, count, largest, keep, *hint);
    const int64_t found = Collect(x, count, range.low, index, magnitudes);
    const uint32_t least = Threshold(magnitudes, found, range, keep);
    int64_t equal = least ? keep - CountFrom(magnitudes, found, least + 1) : 0;
    int64_t kept = 0;
    for (int64_t i = 0; i < found && kept < keep; ++i) {
      if (magnitudes[i] > least || (magnitudes[i] == least && equal-- > 0)) {
        index[kept++] = index[i];
      }
    }
    // The next chunk's numbers may be smaller by some percent.
    constexpr uint32_t kMargin = 1u << 18;
    *hint = least > kMargin ? least - kMargin : 0;
    return kept;
  }

  // The multiples of the unit that magnitudes are closest to.
  static TopKFit Fit(const TopKFormat& format, const float* magnitudes, int64_t count, float unit,
                     uint8_t* multiples) {
    const F divisor = V::Set(unit), one = V::Set(1.0f), top = V::Set(format.top);
    for (int64_t i = 0; i < count; i += kLanes) {
      const F quotient = V::Div(V::Load(magnitudes + i), divisor);
      V::StoreBytes(multiples + i, V::Round(V::Min(V::Max(quotient, one), top)));
    }
    TopKFit fit = {0, 0};
    for (int64_t i = 0; i < count; ++i) {
      fit.products += static_cast<double>(magnitudes[i]) * multiples[i];
      fit.squares += multiples[i] * multiples[i];
    }
    return fit;
  }

  // The better multiples of two tries; returns their unit.
  static float BestFit(const TopKFormat& format, const float* magnitudes, int64_t count,
                       float largest, uint8_t* multiples) {
    double sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += static_cast<double>(magnitudes[i]);
    const float first = largest / format.top;
    const float second = static_cast<float>(sum / (static_cast<double>(count) * format.middle()));
    TopKFit fit = Fit(format, magnitudes, count, first, multiples);
    const TopKFit other = Fit(format, magnitudes, count, second, multiples);
    if (other.gain() > fit.gain()) {
      fit = other;
    } else {
      Fit(format, magnitudes, count, first, multiples);
    }
    return format.Unit(fit);
  }

  static void Run(const EncodeJob& job, int64_t first, int64_t last, const Scratch& scratch,
                  EncodeResult* result) {
    const Layout& layout = job.layout;
    if (last == layout.blocks) {
      const int64_t end = BlockOffset(layout, last - 1) + layout.last_bytes;
      memset(job.payload + end, 0, static_cast<size_t>(layout.payload_bytes - end));
    }
    const PrepareFunction prepare = PickPrepare<V>(StatsKind::kLargest, job.dtype, job.mode);
    uint32_t hint = 0;
    Rounder<V> rounder(job.noise);
    for (int64_t block = first; block < last; ++block) {
      const int64_t start = block * layout.block;
      const int64_t count = BlockElements(layout, block);
      GroupStats stats = {};
      prepare(job, start, count, scratch.x, scratch.kept, &stats);
      const Ahead ahead(job, block + 1);
      for (int64_t tile = 0; tile < count / kTile; ++tile) ahead.Prefetch(tile);
      Chunk(job, block, start, count, stats.largest, scratch, &rounder, &hint, result);
    }
    result->checksum += BlocksChecksum<V>(*job.spec, layout, job.payload, first, last);
    if (job.stream) V::FinishStreams();
  }

  static void Chunk(const EncodeJob& job, int64_t block, int64_t start, int64_t count,
                    uint32_t largest, const Scratch& scratch, Rounder<V>* rounder, uint32_t* hint,
                    EncodeResult* result) {
    const TopKFormat format(*job.spec);
    const bool in_place = job.mode == Mode::kNone && job.dtype == HVDC_DTYPE_FLOAT32;
    const float* x = in_place ? static_cast<const float*>(job.gradient) + start : scratch.x;
    float* kept = job.mode == Mode::kGeneral ? scratch.kept : scratch.x;
    uint32_t* index = reinterpret_cast<uint32_t*>(scratch.lower);
    float* values = scratch.upper;
    uint8_t* const packed = job.payload + BlockOffset(job.layout, block);
    memset(packed, 0, static_cast<size_t>(TopKBytes(*job.spec, count)));
    BitWriter writer(packed);
    const auto put = [&](uint32_t at, uint32_t code) {
      writer.Put(at, format.index_bits);
      writer.Put(code, format.value_bits);
    };
    const bool finite = largest < kInfinityBits;
    if (!finite || (!format.floats() && BitsFloat(largest) < kTiny)) {
      StoreScale(job.payload, block, finite ? 0.0f : BitsFloat(kNanBits));
      result->nonfinite |= !finite;
      if (!finite) return KeepResiduals(job, start, count);
      if (job.mode != Mode::kNone) StoreResiduals<V>(job, rounder, start, count, kept, nullptr);
      return;
    }
    const int64_t keep = Select(x, count, largest, TopKKept(*job.spec, count), hint, index,
                                reinterpret_cast<uint32_t*>(values));
    if (format.floats()) {
      StoreScale(job.payload, block, 1.0f);
      for (int64_t i = 0; i < keep; ++i) {
        const float value = x[index[i]];
        put(index[i], FloatBits(value));
        if (job.mode != Mode::kNone) kept[index[i]] -= value;
      }
    } else {
      uint8_t* const multiples = scratch.codes;
      for (int64_t i = 0; i < keep; ++i) {
        values[i] = BitsFloat(FloatBits(x[index[i]]) & 0x7FFFFFFFu);
      }
      for (int i = 0; i < kLanes; ++i) values[keep + i] = 0.0f;
      const float unit = BestFit(format, values, keep, BitsFloat(largest), multiples);
      StoreScale(job.payload, block, unit);
      for (int64_t i = 0; i < keep; ++i) {
        const bool negative = FloatBits(x[index[i]]) >> 31;
        const uint32_t code = format.Code(multiples[i], negative);
        put(index[i], code);
        if (job.mode != Mode::kNone) kept[index[i]] -= format.Value(code, unit);
      }
    }
    writer.Finish();
    if (job.mode != Mode::kNone) StoreResiduals<V>(job, rounder, start, count, kept, nullptr);
  }
};

template <class V>
struct TopKDecoder {
  static void Run(const DecodeJob& job, int64_t first, int64_t last, const Scratch& scratch,
                  uint64_t* checksums) {
    const Layout& layout = job.layout;
    const TopKFormat format(*job.spec);
    for (int64_t block = first; block < last; ++block) {
      const int64_t count = BlockElements(layout, block);
      const int64_t keep = TopKKept(*job.spec, count);
      memset(scratch.x, 0, static_cast<size_t>(count + kLanes) * sizeof(float));
      for (int32_t k = 0; k < job.count; ++k) {
        const uint8_t* payload = job.payloads + k * job.stride;
        checksums[k] += BlocksChecksum<V>(*job.spec, layout, payload, block, block + 1);
        const float unit = LoadScale(payload, block);
        BitReader entries(payload + BlockOffset(layout, block));
        const bool fits = Add(format, &entries, unit, keep, count, scratch.x);
        checksums[job.count + k] += !fits;
        if (unit != unit) {
          for (int64_t i = 0; i < count; ++i) scratch.x[i] += unit;
        }
      }
      Finish<V>(job, scratch.x, count, block * layout.block);
    }
  }

  // Whether the indices ascend and lie in the chunk; the first that does not ends the sum. Entries
  // behind the last element are 0.
  static bool Add(const TopKFormat& format, BitReader* entries, float unit, int64_t keep,
                  int64_t count, float* sums) {
    int64_t before = -1;
    for (int64_t i = 0; i < keep; ++i) {
      const int64_t index = entries->Take(format.index_bits);
      const uint32_t code = entries->Take(format.value_bits);
      if (i && !index && !code) {
        before = count;
        continue;
      }
      if (index <= before || index >= count) return false;
      sums[index] += format.Value(code, unit);
      before = index;
    }
    return true;
  }
};

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CPU_TOPK_BLOCKS_H_
