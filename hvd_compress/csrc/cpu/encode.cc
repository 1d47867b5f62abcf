// Encoding a tensor: statistics where groups are larger than blocks, then blocks, then the header.
#include <string.h>

#include "codec/header.h"
#include "codec/onebit.h"
#include "codec/philox.h"
#include "codec/stats.h"
#include "codec/sums.h"
#include "cpu/fold.h"
#include "cpu/fp_env.h"
#include "cpu/jobs.h"
#include "cpu/kernels.h"
#include "cpu/scratch.h"
#include "cpu/tables.h"
#include "cpu/thread_pool.h"

namespace hvdc {
namespace {

struct Call {
  EncodeJob job;
  const Kernels* kernels;
  const ScratchSet* scratch;
  int threads;
};

void StoreValues(const Call& call, int64_t group, const GroupScale& scale) {
  float* scales = reinterpret_cast<float*>(call.job.payload + kHeaderBytes);
  const bool sides = call.job.spec->codec == HVDC_ONEBIT;
  scales[group] = sides ? scale.lower : scale.sent;
  if (sides) scales[call.job.layout.scales / 2 + group] = scale.upper;
}

// One group or one group a row: lane sums of chunks, and then of the chunks' sums.
bool RowStatistics(Call* call, int64_t rows, int64_t row_length) {
  const hvdc_spec& spec = *call->job.spec;
  const int64_t chunks = (row_length + kChunk - 1) / kChunk;
  // Short rows have their values as soon as they have been read, in pieces of bounded size.
  const int64_t piece = chunks > 1 ? rows : (rows < 65536 ? rows : 65536);
  const Buffer<GroupStats> stats(piece * chunks);
  const Buffer<double> sums(chunks);
  if (!stats || !sums) return false;
  float* const floats = reinterpret_cast<float*>(sums.data());
  bool finite = true;
  for (int64_t first = 0; first < rows; first += piece) {
    const int64_t some = rows - first < piece ? rows - first : piece;
    EncodeJob job = call->job;
    const int64_t skip = first * row_length;
    job.gradient = static_cast<const uint8_t*>(job.gradient) +
                   skip * (job.dtype == HVDC_DTYPE_FLOAT32 ? 4 : 2);
    if (job.mode != Mode::kNone) job.residual += skip;
    const int64_t per_chunk = row_length < kChunk ? row_length : kChunk;
    ParallelFor(some * chunks, 16384 / per_chunk, call->threads,
                [&](int64_t begin, int64_t end, int worker) {
                  call->kernels->chunk_stats(job, row_length, begin, end, call->scratch->Of(worker),
                                             stats.data());
                });
    for (int64_t row = 0; row < some; ++row) {
      GroupStats* part = stats.data() + row * chunks;
      const GroupStats all = FoldChunks(part, chunks, sums.data());
      if (chunks > 1 && spec.codec == HVDC_ONEBIT) {
        int64_t above = 0;
        for (int64_t i = 0; i < chunks; ++i) above += part[i].above;
        for (int64_t i = 0; i < chunks; ++i) floats[i] = part[i].lower;
        const float lower = base::LaneSum(floats, chunks);
        for (int64_t i = 0; i < chunks; ++i) floats[i] = part[i].upper;
        const float upper = base::LaneSum(floats, chunks);
        call->job.group =
            base::OneBitScale(lower, upper, above, row_length, all.largest < kInfinityBits);
      } else {
        call->job.group = base::ScaleOf(spec, all, row_length);
      }
      StoreValues(*call, first + row, call->job.group);
      finite = finite && call->job.group.finite;
    }
  }
  call->job.group.finite = finite;
  return true;
}

// One group a column: rows one after the other within chunks of rows, and then the chunks' sums.
bool ColumnStatistics(Call* call) {
  constexpr int64_t kStripe = 1024;  // columns whose sums stay in the cache next to the core
  const hvdc_spec& spec = *call->job.spec;
  const int64_t rows = spec.rows, columns = spec.columns;
  const int64_t chunks = (rows + kRowChunk - 1) / kRowChunk;
  const int64_t stripes = (columns + kStripe - 1) / kStripe;
  // Chunks whose sums are kept at a time: enough tasks for all threads, and little memory.
  int64_t wave = 65536 / columns;
  if (wave < 4 * call->threads / stripes + 1) wave = 4 * call->threads / stripes + 1;
  if (wave > chunks) wave = chunks;
  const Buffer<float> lower((wave + 1) * columns), upper((wave + 1) * columns);
  const Buffer<uint32_t> above(wave * columns), largest(call->threads);
  const Buffer<int64_t> total_above(columns);
  if (!lower || !upper || !above || !largest || !total_above) return false;
  float* const total_lower = lower.data() + wave * columns;
  float* const total_upper = upper.data() + wave * columns;
  for (int64_t first = 0; first < chunks; first += wave) {
    const int64_t some = chunks - first < wave ? chunks - first : wave;
    ParallelFor(some * stripes, 1, call->threads, [&](int64_t begin, int64_t end, int worker) {
      for (int64_t task = begin; task < end; ++task) {
        const int64_t row = (first + task / stripes) * kRowChunk;
        const int64_t column = task % stripes * kStripe;
        const int64_t at = task / stripes * columns + column;
        const ColumnSums sums = {lower.data() + at, upper.data() + at, above.data() + at};
        const uint32_t most = call->kernels->column_stats(
            call->job, row, rows - row < kRowChunk ? rows - row : kRowChunk, column,
            columns - column < kStripe ? columns - column : kStripe, sums);
        if (most > largest[worker]) largest[worker] = most;
      }
    });
    for (int64_t chunk = 0; chunk < some; ++chunk) {
      const int64_t at = chunk * columns;
      for (int64_t i = 0; i < columns; ++i) {
        total_lower[i] += lower[at + i];
        total_upper[i] += upper[at + i];
        total_above[i] += above[at + i];
      }
    }
  }
  bool finite = true;
  for (int i = 0; i < call->threads; ++i) finite = finite && largest[i] < kInfinityBits;
  for (int64_t i = 0; i < columns; ++i) {
    const GroupScale scale =
        base::OneBitScale(total_lower[i], total_upper[i], total_above[i], rows, true);
    finite = finite && scale.finite;
    StoreValues(*call, i, scale);
  }
  call->job.group = GroupScale();
  call->job.group.kept = true;
  call->job.group.finite = finite;
  return true;
}

// The scales of groups that are larger than blocks. One number that is not finite spoils them all.
bool Statistics(Call* call) {
  const hvdc_spec& spec = *call->job.spec;
  bool good;
  if (spec.codec == HVDC_ONEBIT && spec.grouping == HVDC_COLUMN) {
    good = ColumnStatistics(call);
  } else if (spec.codec == HVDC_ONEBIT && spec.grouping == HVDC_ROW) {
    good = RowStatistics(call, spec.rows, spec.columns);
  } else {
    good = RowStatistics(call, 1, call->job.layout.count);
  }
  if (good && !call->job.group.finite) {
    float* scales = reinterpret_cast<float*>(call->job.payload + kHeaderBytes);
    for (int64_t i = 0; i < call->job.layout.scales; ++i) scales[i] = base::BitsFloat(kNanBits);
  }
  return good;
}

EncodeResult EncodeBlocks(const Call& call) {
  struct alignas(64) Slot {
    EncodeResult result;
  };
  Slot slots[kMaxThreads] = {};
  const Layout& layout = call.job.layout;
  ParallelFor(layout.blocks, BlocksPerTask(layout), call.threads,
              [&](int64_t first, int64_t last, int worker) {
                call.kernels->encode(call.job, first, last, call.scratch->Of(worker),
                                     &slots[worker].result);
              });
  EncodeResult all = {};
  for (const Slot& slot : slots) {
    all.checksum += slot.result.checksum;
    all.nonfinite = all.nonfinite || slot.result.nonfinite;
  }
  return all;
}

// Header and whatever stands between it and the codes that no block has summed.
void FinishPayload(const Call& call, uint32_t step, const EncodeResult& result) {
  const EncodeJob& job = call.job;
  const Layout& layout = job.layout;
  Header header = base::MakeHeader(*job.spec, layout, step);
  header.flags = result.nonfinite ? kFlagNonfinite : 0;
  memcpy(job.payload, &header, sizeof(header));
  const int64_t scales_end = kHeaderBytes + 4 * layout.scales;
  memset(job.payload + scales_end, 0, static_cast<size_t>(layout.codes_offset - scales_end));
  const bool summed = base::IsContiguous(*job.spec);
  const int64_t end = summed ? kHeaderBytes : layout.codes_offset;
  header.checksum = result.checksum + call.kernels->checksum(job.payload, 0, end);
  memcpy(job.payload, &header, sizeof(header));
}

}  // namespace
}  // namespace hvdc

extern "C" int hvdc_encode(const hvdc_spec* spec, const hvdc_noise* noise, const void* gradient,
                           int dtype, const hvdc_feedback* feedback, void* payload,
                           int64_t payload_bytes, int threads) {
  using namespace hvdc;
  if (!spec || !noise || !payload || !base::ValidSpec(*spec)) return HVDC_BAD_SPEC;
  if (!ValidDtype(dtype)) return HVDC_BAD_SPEC;
  Call call = {};
  EncodeJob& job = call.job;
  job = MakeEncodeJob(spec, gradient, dtype, feedback);
  if (payload_bytes != job.layout.payload_bytes) return HVDC_BAD_SIZE;
  if (spec->codec == HVDC_INT8 && spec->variant != HVDC_LINEAR) {
    job.tables = &GetInt8Tables(spec->variant);
  }
  job.noise = base::MakeNoise(*noise);
  job.payload = static_cast<uint8_t*>(payload);
  call.kernels = &CurrentKernels();
  call.threads = ClampThreads(threads, BlockTasks(job.layout));
  EncodeResult result = {};
  if (job.layout.count) {
    const ScratchSet scratch(job.layout.block, call.threads);
    if (!scratch) return HVDC_NO_MEMORY;
    call.scratch = &scratch;
    const DefaultFpEnv env;
    if (!base::IsContiguous(*spec) && !base::IsCast(*spec) && !Statistics(&call)) {
      return HVDC_NO_MEMORY;
    }
    result = EncodeBlocks(call);
  }
  FinishPayload(call, static_cast<uint32_t>(noise->step), result);
  return HVDC_OK;
}
