#include "cpu/large_groups.h"

#include <string.h>

#include "codec/layout.h"
#include "codec/onebit.h"
#include "codec/stats.h"
#include "codec/sums.h"
#include "cpu/fold.h"
#include "cpu/tasks.h"
#include "cpu/thread_pool.h"

namespace hvdc {
namespace {

// The threads that take a tensor's statistics, and their memory.
struct Team {
  const Kernels* kernels;
  const ScratchSet* scratch;
  int first, threads;  // of the scratch memory's
  uint8_t* memory;     // BytesFor() as many threads, aligned to 8
};

bool HasLargeGroups(const EncodeJob& job) {
  return job.layout.count && !base::IsContiguous(*job.spec) && !base::IsCast(*job.spec);
}

// The next count elements of memory that is handed out piece by piece.
template <class T>
T* Take(uint8_t** memory, int64_t count) {
  T* const taken = reinterpret_cast<T*>(*memory);
  *memory += count * static_cast<int64_t>(sizeof(T));
  return taken;
}

// One group, or one group a row, cut into chunks.
struct RowPlan {
  RowPlan(int64_t row_count, int64_t row_length) : rows(row_count), length(row_length) {
    chunks = (length + kChunk - 1) / kChunk;
    // Short rows have their values as soon as they have been read, in pieces of bounded size.
    piece = chunks > 1 ? rows : (rows < 65536 ? rows : 65536);
  }

  int64_t Bytes() const {
    return piece * chunks * static_cast<int64_t>(sizeof(GroupStats)) +
           chunks * static_cast<int64_t>(sizeof(double));
  }

  int64_t rows, length, chunks, piece;
};

RowPlan PlanRows(const EncodeJob& job) {
  const hvdc_spec& spec = *job.spec;
  const bool by_row = spec.codec == HVDC_ONEBIT && spec.grouping == HVDC_ROW;
  return by_row ? RowPlan(spec.rows, spec.columns) : RowPlan(1, job.layout.count);
}

// One group a column: stripes of columns whose sums stay in the cache next to the core, and waves
// of chunks of rows, so that there are enough tasks for all threads, and little memory.
struct ColumnPlan {
  static constexpr int64_t kStripe = 1024;

  ColumnPlan(int64_t row_count, int64_t column_count, int threads)
      : rows(row_count), columns(column_count), largest(threads) {
    chunks = (rows + kRowChunk - 1) / kRowChunk;
    stripes = (columns + kStripe - 1) / kStripe;
    wave = 65536 / columns;
    if (wave < 4 * threads / stripes + 1) wave = 4 * threads / stripes + 1;
    if (wave > chunks) wave = chunks;
  }

  int64_t Bytes() const {
    const int64_t words = (3 * wave + 2) * columns + largest;
    return words * 4 + columns * static_cast<int64_t>(sizeof(int64_t));
  }

  int64_t rows, columns, chunks, stripes, wave, largest;
};

bool ByColumn(const hvdc_spec& spec) {
  return spec.codec == HVDC_ONEBIT && spec.grouping == HVDC_COLUMN;
}

void StoreValues(const EncodeJob& job, int64_t group, const GroupScale& scale) {
  float* scales = reinterpret_cast<float*>(job.payload + kHeaderBytes);
  const bool sides = job.spec->codec == HVDC_ONEBIT;
  scales[group] = sides ? scale.lower : scale.sent;
  if (sides) scales[job.layout.scales / 2 + group] = scale.upper;
}

// Calls body(row, chunks' statistics, sums) for every row; sums: room for a number a chunk.
template <class Body>
void EachRow(const Team& team, const EncodeJob& tensor, const RowPlan& plan, const Body& body) {
  uint8_t* memory = team.memory;
  GroupStats* const stats = Take<GroupStats>(&memory, plan.piece * plan.chunks);
  double* const sums = Take<double>(&memory, plan.chunks);
  for (int64_t first = 0; first < plan.rows; first += plan.piece) {
    const int64_t some = plan.rows - first < plan.piece ? plan.rows - first : plan.piece;
    EncodeJob job = tensor;
    const int64_t skip = first * plan.length;
    job.gradient = static_cast<const uint8_t*>(job.gradient) +
                   skip * (job.dtype == HVDC_DTYPE_FLOAT32 ? 4 : 2);
    if (job.mode != Mode::kNone) job.residual = job.ResidualAt(skip);
    const int64_t per_chunk = plan.length < kChunk ? plan.length : kChunk;
    ParallelFor(some * plan.chunks, kTaskElements / per_chunk, team.threads,
                [&](int64_t begin, int64_t end, int worker) {
                  team.kernels->chunk_stats(job, plan.length, begin, end,
                                            team.scratch->Of(team.first + worker), stats);
                });
    for (int64_t row = 0; row < some; ++row) body(first + row, stats + row * plan.chunks, sums);
  }
}

void ScaleRows(const Team& team, EncodeJob* job) {
  const RowPlan plan = PlanRows(*job);
  const int64_t chunks = plan.chunks;
  bool finite = true;
  EachRow(team, *job, plan, [&](int64_t row, const GroupStats* part, double* sums) {
    const GroupStats all = FoldChunks(part, chunks, sums);
    if (chunks > 1 && job->spec->codec == HVDC_ONEBIT) {
      float* const floats = reinterpret_cast<float*>(sums);
      int64_t above = 0;
      for (int64_t i = 0; i < chunks; ++i) above += part[i].above;
      for (int64_t i = 0; i < chunks; ++i) floats[i] = part[i].lower;
      const float lower = base::LaneSum(floats, chunks);
      for (int64_t i = 0; i < chunks; ++i) floats[i] = part[i].upper;
      const float upper = base::LaneSum(floats, chunks);
      job->group = base::OneBitScale(lower, upper, above, plan.length, all.largest < kInfinityBits);
    } else {
      job->group = base::ScaleOf(*job->spec, all, plan.length);
    }
    StoreValues(*job, row, job->group);
    finite = finite && job->group.finite;
  });
  job->group.finite = finite;
}

// Rows one after the other within chunks of rows, and then the chunks' sums.
void ScaleColumns(const Team& team, EncodeJob* job) {
  const ColumnPlan plan(job->spec->rows, job->spec->columns, team.threads);
  const int64_t rows = plan.rows, columns = plan.columns, stripes = plan.stripes;
  constexpr int64_t kStripe = ColumnPlan::kStripe;
  uint8_t* memory = team.memory;
  int64_t* const total_above = Take<int64_t>(&memory, columns);
  float* const total_lower = Take<float>(&memory, columns);
  float* const total_upper = Take<float>(&memory, columns);
  uint32_t* const largest = Take<uint32_t>(&memory, plan.largest);
  memset(team.memory, 0, static_cast<size_t>(memory - team.memory));
  float* const lower = Take<float>(&memory, plan.wave * columns);
  float* const upper = Take<float>(&memory, plan.wave * columns);
  uint32_t* const above = Take<uint32_t>(&memory, plan.wave * columns);
  for (int64_t first = 0; first < plan.chunks; first += plan.wave) {
    const int64_t some = plan.chunks - first < plan.wave ? plan.chunks - first : plan.wave;
    ParallelFor(some * stripes, 1, team.threads, [&](int64_t begin, int64_t end, int worker) {
      for (int64_t task = begin; task < end; ++task) {
        const int64_t row = (first + task / stripes) * kRowChunk;
        const int64_t column = task % stripes * kStripe;
        const int64_t at = task / stripes * columns + column;
        const ColumnSums sums = {lower + at, upper + at, above + at};
        const uint32_t most = team.kernels->column_stats(
            *job, row, rows - row < kRowChunk ? rows - row : kRowChunk, column,
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
  for (int i = 0; i < team.threads; ++i) finite = finite && largest[i] < kInfinityBits;
  for (int64_t i = 0; i < columns; ++i) {
    const GroupScale scale =
        base::OneBitScale(total_lower[i], total_upper[i], total_above[i], rows, true);
    finite = finite && scale.finite;
    StoreValues(*job, i, scale);
  }
  job->group = GroupScale();
  job->group.kept = true;
  job->group.finite = finite;
}

int64_t BytesFor(const EncodeJob& job, int threads) {
  if (ByColumn(*job.spec)) return ColumnPlan(job.spec->rows, job.spec->columns, threads).Bytes();
  return PlanRows(job).Bytes();
}

void Scale(const Team& team, EncodeJob* job) {
  ByColumn(*job->spec) ? ScaleColumns(team, job) : ScaleRows(team, job);
  if (job->group.finite) return;
  float* scales = reinterpret_cast<float*>(job->payload + kHeaderBytes);
  for (int64_t i = 0; i < job->layout.scales; ++i) scales[i] = base::BitsFloat(kNanBits);
}

}  // namespace

// Threads take short tensors each alone, several at the same time, and long ones together.
bool ScaleLargeGroups(EncodeJob* jobs, int64_t tensors, const Kernels& kernels,
                      const ScratchSet& scratch, int threads) {
  constexpr int64_t kAlone = 4 * kTaskElements;
  int64_t together_bytes = 0, alone_bytes = 0, alone_elements = 0;
  for (int64_t i = 0; i < tensors; ++i) {
    if (!HasLargeGroups(jobs[i])) continue;
    const bool alone = jobs[i].layout.count <= kAlone;
    const int64_t bytes = BytesFor(jobs[i], alone ? 1 : threads);
    int64_t* const most = alone ? &alone_bytes : &together_bytes;
    if (bytes > *most) *most = bytes;
    if (alone) alone_elements += jobs[i].layout.count;
  }
  if (!together_bytes && !alone_bytes) return true;
  alone_bytes = base::RoundUp(alone_bytes, 64);
  const int workers = ClampThreads(threads, alone_elements / kTaskElements);
  const int64_t bytes = workers * alone_bytes;
  const Buffer<uint8_t> memory(bytes > together_bytes ? bytes : together_bytes,
                               Buffer<uint8_t>::Fill::kNone);
  if (!memory) return false;
  if (alone_elements) {
    ParallelFor(tensors, 1, workers, [&](int64_t first, int64_t last, int worker) {
      const Team team = {&kernels, &scratch, worker, 1, memory.data() + worker * alone_bytes};
      for (int64_t i = first; i < last; ++i) {
        if (HasLargeGroups(jobs[i]) && jobs[i].layout.count <= kAlone) Scale(team, &jobs[i]);
      }
    });
  }
  if (together_bytes) {
    const Team team = {&kernels, &scratch, 0, threads, memory.data()};
    for (int64_t i = 0; i < tensors; ++i) {
      if (HasLargeGroups(jobs[i]) && jobs[i].layout.count > kAlone) Scale(team, &jobs[i]);
    }
  }
  return true;
}

}  // namespace hvdc
