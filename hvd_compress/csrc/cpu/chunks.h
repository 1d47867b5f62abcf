// Entropy-coded codes: chunks of blocks that have been encoded, and chunks into a sum, or back into
// a residual.
#ifndef HVDC_CPU_CHUNKS_H_
#define HVDC_CPU_CHUNKS_H_

#include "codec/rans.h"
#include "cpu/decode_blocks.h"

namespace hvdc {
namespace HVDC_ARCH {

template <class V, int kChunks>
inline void EncodeSome(const EncodeJob& job, const RansEncodeTable& table, int64_t number,
                       const Scratch& scratch, EncodedChunk* chunks) {
  const Layout& layout = job.layout;
  const int64_t first = number * layout.chunk;
  const int64_t last = first + layout.chunk < layout.blocks ? first + layout.chunk : layout.blocks;
  uint16_t* ends[kChunks];
  for (int k = 0; k < kChunks; ++k) ends[k] = chunks[k].end;
  const int lanes = RansLanes(RangeElements(layout, first, last));
  RansEncoder<V, kChunks> encoder(table, Alphabet(*job.spec), lanes, ends);
  for (int64_t block = last - 1; block >= first; --block) {
    const int64_t count = BlockElements(layout, block);
    for (int k = 0; k < kChunks; ++k) {
      const uint8_t* const packed = job.payload + BlockOffset(layout, block + k * layout.chunk);
      UnpackCodes<V>(*job.spec, packed, count, scratch.chunks[k]);
      if (block == first) continue;
      // The block before it comes next, which the hardware does not guess.
      const uint8_t* const next = packed - layout.block_bytes;
      for (int64_t i = 0; i < layout.block_bytes; i += 64) __builtin_prefetch(next + i);
    }
    encoder.Encode(scratch.chunks, count);
  }
  for (int k = 0; k < kChunks; ++k) {
    chunks[k].words = chunks[k].end - encoder.words(k);
    encoder.Store(k, chunks[k].states);
  }
}

template <class V>
inline void EncodeChunks(const EncodeJob& job, const RansEncodeTable& table, int64_t first,
                         int64_t count, const Scratch& scratch, EncodedChunk* chunks) {
  if (count == kChunksTogether) {
    return EncodeSome<V, kChunksTogether>(job, table, first, scratch, chunks);
  }
  for (int64_t i = 0; i < count; ++i) EncodeSome<V, 1>(job, table, first + i, scratch, chunks + i);
}

// C: a coder whose codes are bytes, packed.
template <class V, class C>
struct ChunkDecoder {
  using Blocks = BlockDecoder<V, C>;

  // The codes of a chunk's blocks, one block after the other.
  struct Codes {
    const DecodeJob& job;
    const Scratch& scratch;
    const uint8_t* payload;
    C* coder;
    bool coded;
    RansStream stream;

    Codes(const DecodeJob& job_, const Scratch& scratch_, int32_t rank, int64_t first, int64_t last,
          C* coder_)
        : job(job_), scratch(scratch_), payload(job_.payloads + rank * job_.stride), coder(coder_) {
      const hvdc_spec& spec = *job.spec;
      const Layout& layout = job.layout;
      Header header;
      memcpy(&header, payload, sizeof(header));
      coded = header.flags & kFlagCoded;
      if (!coded) return;
      const int64_t length = PayloadLength(spec, layout, header.flags);
      const ChunkPlace place = FindChunk(spec, layout, payload, length, first / layout.chunk);
      stream.lanes = RansLanes(RangeElements(layout, first, last));
      for (uint32_t& state : stream.states) state = kRansLower;
      const size_t states = static_cast<size_t>(4 * stream.lanes);
      memcpy(stream.states, payload + place.begin, states);
      stream.next = reinterpret_cast<const uint16_t*>(payload + place.begin + states);
      stream.end = reinterpret_cast<const uint16_t*>(payload + place.end);
      MakeRansDecodeTable(payload + layout.codes_offset, Alphabet(spec), scratch.table);
    }

    // Scales go into the coder.
    const uint8_t* Next(int64_t block, int64_t count) {
      if (!coded) return Blocks::Open(job, payload, block, count, scratch, coder);
      Blocks::OpenScales(job, payload, block, count, scratch, coder);
      RansDecoder<V>::Decode(*scratch.table, &stream, count, scratch.codes);
      return scratch.codes;
    }
  };

  // One payload whose numbers go straight to the output.
  static void Direct(const DecodeJob& job, int64_t first, int64_t last, const Scratch& scratch) {
    C coder(CoderSetup{job.spec, job.tables});
    Codes codes(job, scratch, 0, first, last, &coder);
    const typename V::F scale = V::Set(job.scale);
    for (int64_t block = first; block < last; ++block) {
      const int64_t start = block * job.layout.block;
      const int64_t count = BlockElements(job.layout, block), whole = count / kTile * kTile;
      const uint8_t* const bytes = codes.Next(block, count);
      float* const out = static_cast<float*>(job.out) + start;
      Blocks::Dequantize(coder, bytes, 0, whole, FinishSink<V>{out, scale});
      if (whole == count) continue;
      memset(scratch.x + whole, 0, kTile * sizeof(float));
      Blocks::Dequantize(coder, bytes, whole, count, AddSink<V>{scratch.x});
      Finish<V>(job, scratch.x + whole, count - whole, start + whole);
    }
  }

  // The sum of a whole chunk stays in the cache while payloads are added to it one by one, since
  // each has its own table.
  static void Sum(const DecodeJob& job, int64_t first, int64_t last, const Scratch& scratch) {
    if (job.count == 1 && job.dtype == HVDC_DTYPE_FLOAT32 && !IsRotated(*job.spec)) {
      return Direct(job, first, last, scratch);
    }
    const int64_t elements = RangeElements(job.layout, first, last);
    memset(scratch.x, 0, static_cast<size_t>(elements + kTile) * sizeof(float));
    for (int32_t rank = 0; rank < job.count; ++rank) {
      C coder(CoderSetup{job.spec, job.tables});
      Codes codes(job, scratch, rank, first, last, &coder);
      for (int64_t block = first; block < last; ++block) {
        const int64_t count = BlockElements(job.layout, block);
        const uint8_t* const bytes = codes.Next(block, count);
        float* const sums = scratch.x + (block - first) * job.layout.block;
        Blocks::Add(job, coder, bytes, 0, count, scratch, sums);
      }
    }
    Finish<V>(job, scratch.x, elements, first * job.layout.block);
  }

  static void Run(const DecodeJob& job, int64_t first, int64_t last, const Scratch& scratch) {
    for (int64_t next; first < last; first = next) {
      next = first + job.layout.chunk < last ? first + job.layout.chunk : last;
      Sum(job, first, next, scratch);
    }
  }
};

template <class V>
inline void DecodeChunks(const DecodeJob& job, int64_t first, int64_t last,
                         const Scratch& scratch) {
  if (job.spec->codec == HVDC_TERNARY) {
    return ChunkDecoder<V, TernaryCoder<V>>::Run(job, first, last, scratch);
  }
  return ChunkDecoder<V, EcqCoder<V>>::Run(job, first, last, scratch);
}

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CPU_CHUNKS_H_
