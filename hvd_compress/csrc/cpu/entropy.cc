#include "cpu/entropy.h"

#include <string.h>

#include "codec/layout.h"
#include "codec/rans.h"
#include "cpu/thread_pool.h"

namespace hvdc {
namespace {

constexpr int64_t kSlack = 16;  // words that a vector may write before the first one

// A chunk that is to be put into its payload.
struct CodedChunk {
  int64_t tensor, number;  // within the tensor
  int64_t place;  // where it goes, in bytes from the payload's start; 0 where it is not used
  int lanes;
};

int64_t NumberCoded(const EncodeJob* jobs, int64_t tensors, int64_t* numbers) {
  int64_t coded = 0;
  for (int64_t i = 0; numbers && i < tensors; ++i) {
    const bool yes = base::IsEntropyCoded(*jobs[i].spec) && jobs[i].layout.count;
    numbers[i] = yes ? coded++ : -1;
  }
  return coded;
}

int64_t BytesOf(const CodedChunk& chunk, const EncodedChunk& encoded) {
  return base::RoundUp(4 * chunk.lanes + 2 * encoded.words, 4);
}

// Gives the tensor's chunks their places; returns the payload's length, 0 where it is not shorter.
int64_t PlaceChunks(const EncodeJob& job, int64_t chunks, const EncodedChunk* encoded,
                    CodedChunk* chunk) {
  int64_t end = job.layout.codes_offset + base::RansHeadBytes(*job.spec, job.layout);
  for (int64_t i = 0; i < chunks; ++i) {
    chunk[i].place = end;
    end += BytesOf(chunk[i], encoded[i]);
  }
  const int64_t length = base::RansLength(job.layout, end);
  for (int64_t i = 0; !length && i < chunks; ++i) chunk[i].place = 0;
  return length;
}

// Table, index, and the padding at the end.
void StoreHead(const EncodeJob& job, const uint16_t* frequencies, int64_t chunks,
               const EncodedChunk* encoded, const CodedChunk* chunk, int64_t length) {
  const int alphabet = base::Alphabet(*job.spec);
  uint8_t* const table = job.payload + job.layout.codes_offset;
  uint8_t* const index = table + base::RansTableBytes(*job.spec);
  memset(table, 0, static_cast<size_t>(index - table));
  memcpy(table, frequencies, sizeof(uint16_t) * static_cast<size_t>(alphabet));
  for (int64_t i = 1; i < chunks; ++i) {
    const uint32_t begin = static_cast<uint32_t>((chunk[i].place - chunk[0].place) / 4);
    memcpy(index + 4 * (i - 1), &begin, 4);
  }
  const int64_t end = chunk[chunks - 1].place + BytesOf(chunk[chunks - 1], encoded[chunks - 1]);
  memset(job.payload + end, 0, static_cast<size_t>(length - end));
}

void StoreChunk(const CodedChunk& chunk, const EncodedChunk& encoded, uint8_t* payload) {
  const size_t states = static_cast<size_t>(4 * chunk.lanes);
  const size_t words = sizeof(uint16_t) * static_cast<size_t>(encoded.words);
  uint8_t* const to = payload + chunk.place;
  memcpy(to, encoded.states, states);
  memcpy(to + states, encoded.end - encoded.words, words);
  if (encoded.words % 2) memset(to + states + words, 0, sizeof(uint16_t));
}

}  // namespace

EntropyCoder::EntropyCoder(const EncodeJob* jobs, int64_t tensors)
    : jobs_(jobs),
      tensors_(tensors),
      numbers_(tensors, Buffer<int64_t>::Fill::kNone),
      coded_(NumberCoded(jobs, tensors, numbers_.data())),
      counts_(kMaxAlphabet * coded_) {}

void EntropyCoder::AddCounts(int64_t tensor, const uint32_t* counts) const {
  uint64_t* const all = CountsOf(tensor);
  for (int c = 0; c < base::Alphabet(*jobs_[tensor].spec); ++c) {
    if (counts[c]) __atomic_fetch_add(all + c, counts[c], __ATOMIC_RELAXED);
  }
}

bool EntropyCoder::Code(const ScratchSet& scratch, int threads, const Kernels& kernels,
                        int64_t* lengths) const {
  int64_t count = 0, elements = 0;
  for (int64_t i = 0; i < tensors_; ++i) {
    if (numbers_[i] < 0) continue;
    count += base::Chunks(jobs_[i].layout);
    elements += jobs_[i].layout.count;
  }
  const Buffer<CodedChunk> chunks(count, Buffer<CodedChunk>::Fill::kNone);
  const Buffer<EncodedChunk> encoded(count, Buffer<EncodedChunk>::Fill::kNone);
  // The first chunk of each task. Chunks go together where that leaves every thread some.
  const Buffer<int64_t> tasks(count + 1, Buffer<int64_t>::Fill::kNone);
  const int64_t together = count >= kChunksTogether * threads ? kChunksTogether : 1;
  const Buffer<RansEncodeTable> tables(coded_, Buffer<RansEncodeTable>::Fill::kNone);
  const Buffer<uint16_t> frequencies(kMaxAlphabet * coded_, Buffer<uint16_t>::Fill::kNone);
  // There are at most as many words as elements. Pages that are not written take no memory.
  const Buffer<uint16_t> words(elements + kSlack * count, Buffer<uint16_t>::Fill::kNone);
  if (!chunks || !encoded || !tasks || !tables || !frequencies || !words) return false;
  int64_t made = 0, task = 0;
  uint16_t* end = words.data();
  for (int64_t i = 0; i < tensors_; ++i) {
    if (numbers_[i] < 0) continue;
    const Layout& layout = jobs_[i].layout;
    const int alphabet = base::Alphabet(*jobs_[i].spec);
    uint16_t* const own = frequencies.data() + kMaxAlphabet * numbers_[i];
    base::RansFrequencies(CountsOf(i), alphabet, own);
    base::MakeRansEncodeTable(own, alphabet, &tables[numbers_[i]]);
    for (int64_t number = 0; number < base::Chunks(layout); ++number) {
      const int64_t elements = base::ChunkElements(layout, number);
      const bool full = elements == layout.chunk * layout.block;
      if (!full || number % together == 0) tasks[task++] = made;
      end += kSlack + elements;
      encoded[made].end = end;
      chunks[made++] = {i, number, 0, base::RansLanes(elements)};
    }
  }
  tasks[task] = count;
  ParallelFor(task, 1, threads, [&](int64_t first, int64_t last, int worker) {
    for (int64_t i = first; i < last; ++i) {
      const CodedChunk& chunk = chunks[tasks[i]];
      kernels.encode_chunks(jobs_[chunk.tensor], tables[numbers_[chunk.tensor]], chunk.number,
                            tasks[i + 1] - tasks[i], scratch.Of(worker), encoded.data() + tasks[i]);
    }
  });
  int64_t done = 0;
  for (int64_t i = 0; i < tensors_; ++i) {
    lengths[i] = 0;
    if (numbers_[i] < 0) continue;
    const int64_t parts = base::Chunks(jobs_[i].layout);
    const EncodedChunk* const from = encoded.data() + done;
    CodedChunk* const own = chunks.data() + done;
    lengths[i] = PlaceChunks(jobs_[i], parts, from, own);
    if (lengths[i]) {
      const uint16_t* const table = frequencies.data() + kMaxAlphabet * numbers_[i];
      StoreHead(jobs_[i], table, parts, from, own, lengths[i]);
    }
    done += parts;
  }
  ParallelFor(count, 1, threads, [&](int64_t first, int64_t last, int) {
    for (int64_t i = first; i < last; ++i) {
      if (!chunks[i].place) continue;
      StoreChunk(chunks[i], encoded[i], jobs_[chunks[i].tensor].payload);
    }
  });
  return true;
}

}  // namespace hvdc
