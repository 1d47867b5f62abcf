// Batches: what is known of them before the first call, and the calls.
#define HVDC_ARCH device

#include <string.h>

#include <algorithm>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "codec/philox.h"
#include "codec/tables.h"
#include "cuda/batch.h"
#include "cuda/call.h"
#include "cuda/launch.h"

namespace hvdc {
namespace HVDC_ARCH {
namespace {

constexpr int64_t kTables = 5;

__global__ void FillTables(Int8Tables* tables) {
  // One thread each: this is done once.
  if (threadIdx.x % kWarpSize) return;
  for (uint32_t table = threadIdx.x / kWarpSize; table < kTables; table += kWarps) {
    BuildInt8Tables(HVDC_DYNAMIC + table, tables + table);
  }
}

// An array of a call, by number, and the bytes of an element of its residual; 0 without one.
struct Use {
  int32_t array;
  int64_t residual;
};

// Items with the same kernel, in one launch.
template <class Batch>
struct Group {
  int stage;  // groups of later stages use what those of earlier ones have found
  void (*kernel)(Batch);
  size_t shared;
  std::vector<Use> arrays;  // in the order of the parameter
  std::vector<Share> shares;
};

// An item's part of a group.
template <class Batch>
struct Part {
  int stage;
  Work<Batch> work;
  uint32_t item;
  Use use;

  auto Key() const { return std::make_tuple(stage, reinterpret_cast<uintptr_t>(work.kernel)); }
};

// Items and groups, and where they are in the device's memory.
template <class Item, class Batch>
struct Plan {
  std::vector<Item> items;
  std::vector<Group<Batch>> groups;

  int64_t bytes = 0, copied = 0;  // of all, and of shares and items
  const Item* device_items = nullptr;
  const Share* device_shares = nullptr;  // of all groups, one behind the other
  Int8Tables* tables = nullptr;
  Control* controls = nullptr;  // one an item, and behind them the checksums and the verdict
  int64_t zeros = 0;            // bytes from there on
};

using EncodePlan = Plan<EncodeItem, EncodeBatch>;
using DecodePlan = Plan<DecodeItem, DecodeBatch>;

void AddParts(const EncodeItem& item, uint32_t number, Use use,
              std::vector<Part<EncodeBatch>>* parts) {
  const Statistics statistics = StatisticsWork(item.job);
  int stage = 0;
  for (const Work<EncodeBatch>& work :
       {statistics.sum, statistics.fold_chunks, statistics.fold_groups, EncodeWork(item.job)}) {
    if (work.kernel) parts->push_back({stage, work, number, use});
    ++stage;
  }
}

void AddParts(const DecodeItem& item, uint32_t number, Use use,
              std::vector<Part<DecodeBatch>>* parts) {
  parts->push_back({0, DecodeWork(item.job), number, use});
}

// The number of blocks of kThreads that the current device runs at a time.
template <class Batch>
int Resident(void (*kernel)(Batch), size_t shared, int64_t* most) {
  int device = 0, processors = 0, resident = 0;
  int status = Check(cudaGetDevice(&device));
  if (status == HVDC_OK) {
    status = Check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  }
  if (status == HVDC_OK) {
    status =
        Check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, kThreads, shared));
  }
  *most = static_cast<int64_t>(processors) * resident;
  return status;
}

// Gives every part of a group its blocks of threads: as many as there is work for, but together no
// more than the device runs at a time, unless there are more parts than that.
template <class Batch>
int ShareBlocks(const Part<Batch>* first, const Part<Batch>* last, Group<Batch>* group) {
  int64_t most, wanted = 0;
  for (const Part<Batch>* part = first; part < last; ++part) {
    wanted += std::max(part->work.blocks, int64_t{1});
    group->shared = std::max(group->shared, part->work.shared);
  }
  const int status = Resident(group->kernel, group->shared, &most);
  if (status != HVDC_OK) return status;
  for (const Part<Batch>* part = first; part < last; ++part) {
    int64_t blocks = part->work.blocks;
    if (wanted > most) blocks = blocks * most / wanted;
    blocks = std::max(blocks, int64_t{1});
    if (group->arrays.empty() || group->arrays.back().array != part->use.array) {
      group->arrays.push_back(part->use);
    }
    int64_t& residual = group->arrays.back().residual;
    residual = std::max(residual, part->use.residual);
    const uint32_t array = static_cast<uint32_t>(group->arrays.size() - 1);
    for (int64_t block = 0; block < blocks; ++block) {
      group->shares.push_back(
          {part->item, static_cast<uint32_t>(block), static_cast<uint32_t>(blocks), array});
    }
  }
  return HVDC_OK;
}

template <class Item, class Batch>
int MakeGroups(std::vector<Part<Batch>> parts, Plan<Item, Batch>* plan) {
  std::stable_sort(parts.begin(), parts.end(), [](const Part<Batch>& a, const Part<Batch>& b) {
    return std::make_tuple(a.Key(), a.use.array) < std::make_tuple(b.Key(), b.use.array);
  });
  const Part<Batch>* const end = parts.data() + parts.size();
  for (const Part<Batch>* first = parts.data(); first < end;) {
    int arrays = 1;
    const Part<Batch>* last = first + 1;
    for (; last < end && last->Key() == first->Key(); ++last) {
      arrays += last->use.array != last[-1].use.array;
      if (arrays > Batch::kArrays) break;
    }
    plan->groups.push_back({first->stage, first->work.kernel, 0, {}, {}});
    const int status = ShareBlocks(first, last, &plan->groups.back());
    if (status != HVDC_OK) return status;
    first = last;
  }
  return HVDC_OK;
}

// Checks a spec, and finds the layout of its payload.
template <class Job>
int Describe(const hvdc_spec& spec, Job* job, Passes* passes) {
  // Entropy codes and rotations are the CPU's.
  if (!ValidSpec(spec) || IsEntropyCoded(spec) || IsRotated(spec)) return HVDC_BAD_SPEC;
  job->spec = spec;
  job->layout = MakeLayout(spec);
  if (job->layout.count > INT32_MAX || job->layout.payload_bytes / 4 > INT32_MAX) {
    return HVDC_CUDA_TOO_LARGE;
  }
  job->blocks = MakeBlocks(spec, job->layout);
  *passes = MakePasses(spec, job->layout);
  return HVDC_OK;
}

int DescribeItem(const hvdc_cuda_entry& entry, int64_t, int32_t, EncodeItem* item) {
  EncodeJob& job = item->job;
  job.noise = MakeNoise(entry.noise);
  if (entry.feedback) {
    if (!ValidResidualDtype(entry.residual_dtype)) return HVDC_BAD_SPEC;
    job.residual_dtype = entry.residual_dtype;
    job.mode = entry.alpha == entry.beta ? Mode::kShared : Mode::kGeneral;
    job.alpha = entry.alpha;
    job.beta = entry.beta;
  }
  return Describe(entry.spec, &job, &job.passes);
}

int DescribeItem(const hvdc_cuda_entry& entry, int64_t items, int32_t payloads, DecodeItem* item) {
  item->job.count = payloads;
  item->job.jobs = static_cast<uint32_t>(items);
  Passes passes;
  return Describe(entry.spec, &item->job, &passes);
}

int64_t PayloadsOf(const EncodeItem&) { return 0; }
int64_t PayloadsOf(const DecodeItem& item) { return item.job.count; }

Passes PassesOf(const EncodeItem& item) { return item.job.passes; }
Passes PassesOf(const DecodeItem&) { return {}; }

// Gives the plan its memory, or counts it: returns how many bytes there are. The first ones are the
// shares and the items, which are copied.
template <class Item, class Batch>
int64_t Place(uint8_t* memory, Plan<Item, Batch>* plan) {
  Parts parts = {memory, 0};
  int64_t shares = 0;
  for (const Group<Batch>& group : plan->groups) {
    shares += static_cast<int64_t>(group.shares.size());
  }
  const int64_t items = static_cast<int64_t>(plan->items.size());
  plan->device_shares = parts.Take<Share>(shares);
  plan->device_items = parts.Take<Item>(items, 16);
  plan->copied = parts.used;
  plan->tables = parts.Take<Int8Tables>(kTables);
  const int64_t payloads = items ? PayloadsOf(plan->items[0]) : 0;
  plan->controls = parts.Take<Control>(items);
  const int64_t begin = parts.used - items * static_cast<int64_t>(sizeof(Control));
  unsigned long long* const checksums = parts.Take<unsigned long long>(items * payloads, 16);
  Verdict* const verdict = parts.Take<Verdict>(1, 16);
  plan->zeros = parts.used - begin;
  for (int64_t i = 0; i < items; ++i) {
    Item& item = plan->items[static_cast<size_t>(i)];
    Workspace own = {};
    own.tables = plan->tables;
    if (memory) own.control = plan->controls + i;
    if (memory) own.checksums = checksums + i * payloads;
    own.verdict = verdict;
    TakeScratch(item.job.spec, PassesOf(item), &parts, &own);
    item.job.workspace = own;
  }
  return RoundUp(parts.used, 256);
}

// payloads: how many of each a call decodes.
template <class Item, class Batch>
int MakePlan(const hvdc_cuda_entry* entries, int64_t count, int32_t payloads, int32_t device,
             Plan<Item, Batch>* plan) {
  if (count < 0 || count > INT32_MAX || (count && !entries) || payloads < 0) return HVDC_BAD_SPEC;
  if (payloads > HVDC_CUDA_MAX_PAYLOADS) return HVDC_CUDA_TOO_LARGE;
  const DeviceGuard guard(device);
  if (guard.status() != HVDC_OK) return guard.status();
  std::vector<Part<Batch>> parts;
  for (int64_t i = 0; i < count; ++i) {
    const hvdc_cuda_entry& entry = entries[i];
    if (entry.array < 0 || entry.first < 0 || entry.offset < 0) return HVDC_BAD_SPEC;
    if (entry.offset % 16) return HVDC_CUDA_MISALIGNED;
    Item item = {};
    item.first = entry.first;
    item.offset = entry.offset;
    const int status = DescribeItem(entry, count, payloads, &item);
    if (status != HVDC_OK) return status;
    const int64_t residual = entry.feedback ? ElementBytes(entry.residual_dtype) : 0;
    AddParts(item, static_cast<uint32_t>(i), Use{entry.array, residual}, &parts);
    plan->items.push_back(item);
  }
  const int status = MakeGroups(std::move(parts), plan);
  if (status == HVDC_OK) plan->bytes = Place(nullptr, plan);
  return status;
}

template <class Item, class Batch>
int Upload(Plan<Item, Batch>* plan, uint8_t* memory, const hvdc_cuda_queue& queue) {
  if (plan->items.empty()) return HVDC_OK;
  if (!memory) return HVDC_BAD_SPEC;
  if (!Aligned(memory, 256)) return HVDC_CUDA_MISALIGNED;
  Place(memory, plan);
  std::vector<uint8_t> bytes(static_cast<size_t>(plan->copied));
  uint8_t* to = bytes.data();
  for (const Group<Batch>& group : plan->groups) {
    const size_t size = group.shares.size() * sizeof(Share);
    memcpy(to, group.shares.data(), size);
    to += size;
  }
  const size_t size = plan->items.size() * sizeof(Item);
  memcpy(bytes.data() + bytes.size() - size, plan->items.data(), size);
  const DeviceGuard guard(queue.device);
  if (guard.status() != HVDC_OK) return guard.status();
  // The source is pageable memory, which has been read when the call returns.
  const cudaStream_t stream = StreamOf(queue);
  int status =
      Check(cudaMemcpyAsync(memory, bytes.data(), bytes.size(), cudaMemcpyHostToDevice, stream));
  if (status != HVDC_OK) return status;
  status = Check(cudaMemsetAsync(plan->controls, 0, static_cast<size_t>(plan->zeros), stream));
  if (status == HVDC_OK) status = Launch(FillTables, 1, 0, stream, plan->tables);
  return Settle(status, queue);
}

int CheckArrays(const std::vector<Use>& uses, const hvdc_cuda_array* arrays, int64_t count) {
  if (!arrays && !uses.empty()) return HVDC_BAD_SPEC;
  for (const Use& use : uses) {
    if (use.array >= count) return HVDC_BAD_SPEC;
    const hvdc_cuda_array& array = arrays[use.array];
    if (array.dtype < HVDC_DTYPE_FLOAT32 || array.dtype > HVDC_DTYPE_BFLOAT16) return HVDC_BAD_SPEC;
    if (!Aligned(array.values, ElementBytes(array.dtype))) return HVDC_CUDA_MISALIGNED;
    if (!use.residual) continue;
    if (!Aligned(array.residual, use.residual) || !Aligned(array.next_residual, use.residual)) {
      return HVDC_CUDA_MISALIGNED;
    }
  }
  return HVDC_OK;
}

void Set(size_t place, const hvdc_cuda_array& array, EncodeBatch* batch) {
  batch->gradients[place] = array.values;
  batch->residuals[place] = array.residual;
  batch->next_residuals[place] = array.next_residual;
  batch->steps[place] = array.step;
  batch->dtypes[place] = static_cast<uint8_t>(array.dtype);
}

void Set(size_t place, const hvdc_cuda_array& array, DecodeBatch* batch) {
  batch->values[place] = array.values;
  batch->steps[place] = static_cast<uint32_t>(array.step);
  batch->dtypes[place] = static_cast<uint8_t>(array.dtype);
}

// batch: with what all groups have in common.
template <class Item, class Batch>
int RunBatch(const Plan<Item, Batch>& plan, const hvdc_cuda_array* arrays, int64_t count,
             Batch batch, const hvdc_cuda_queue& queue) {
  for (const Group<Batch>& group : plan.groups) {
    const int status = CheckArrays(group.arrays, arrays, count);
    if (status != HVDC_OK) return status;
  }
  const DeviceGuard guard(queue.device);
  if (guard.status() != HVDC_OK) return guard.status();
  batch.items = plan.device_items;
  batch.shares = plan.device_shares;
  for (const Group<Batch>& group : plan.groups) {
    for (size_t i = 0; i < group.arrays.size(); ++i) Set(i, arrays[group.arrays[i].array], &batch);
    const int64_t blocks = static_cast<int64_t>(group.shares.size());
    const int launched = Launch(group.kernel, blocks, group.shared, StreamOf(queue), batch);
    if (launched != HVDC_OK) {
      // The next call must not find what this call's kernels have left for each other.
      cudaMemsetAsync(plan.controls, 0, static_cast<size_t>(plan.zeros), StreamOf(queue));
      return launched;
    }
    batch.shares += blocks;
  }
  return Settle(HVDC_OK, queue);
}

}  // namespace
}  // namespace HVDC_ARCH
}  // namespace hvdc

using namespace hvdc;
using namespace hvdc::device;

// One of the two.
struct hvdc_cuda_plan {
  std::unique_ptr<EncodePlan> encode;
  std::unique_ptr<DecodePlan> decode;
};

extern "C" int hvdc_cuda_plan_encode(const hvdc_cuda_entry* entries, int64_t count, int32_t device,
                                     hvdc_cuda_plan** plan) {
  if (!plan) return HVDC_BAD_SPEC;
  auto made = std::make_unique<hvdc_cuda_plan>();
  made->encode = std::make_unique<EncodePlan>();
  const int status = MakePlan(entries, count, 0, device, made->encode.get());
  if (status == HVDC_OK) *plan = made.release();
  return status;
}

extern "C" int hvdc_cuda_plan_decode(const hvdc_cuda_entry* entries, int64_t count,
                                     int32_t payloads, int32_t device, hvdc_cuda_plan** plan) {
  if (!plan) return HVDC_BAD_SPEC;
  auto made = std::make_unique<hvdc_cuda_plan>();
  made->decode = std::make_unique<DecodePlan>();
  const int status = MakePlan(entries, count, payloads, device, made->decode.get());
  if (status == HVDC_OK) *plan = made.release();
  return status;
}

extern "C" int64_t hvdc_cuda_plan_bytes(const hvdc_cuda_plan* plan) {
  return plan->encode ? plan->encode->bytes : plan->decode->bytes;
}

extern "C" int hvdc_cuda_plan_prepare(hvdc_cuda_plan* plan, void* memory,
                                      const hvdc_cuda_queue* queue) {
  if (!plan || !queue) return HVDC_BAD_SPEC;
  uint8_t* const bytes = static_cast<uint8_t*>(memory);
  return plan->encode ? Upload(plan->encode.get(), bytes, *queue)
                      : Upload(plan->decode.get(), bytes, *queue);
}

extern "C" void hvdc_cuda_plan_free(hvdc_cuda_plan* plan) { delete plan; }

extern "C" int hvdc_cuda_encode_batch(const hvdc_cuda_plan* plan, const hvdc_cuda_array* arrays,
                                      int64_t array_count, void* message,
                                      const hvdc_cuda_queue* queue) {
  if (!plan || !plan->encode || !queue) return HVDC_BAD_SPEC;
  if (!Aligned(message, 16)) return HVDC_CUDA_MISALIGNED;
  EncodeBatch batch = {};
  batch.message = static_cast<uint8_t*>(message);
  return RunBatch(*plan->encode, arrays, array_count, batch, *queue);
}

extern "C" int hvdc_cuda_decode_batch(const hvdc_cuda_plan* plan, const hvdc_cuda_array* arrays,
                                      int64_t array_count, const void* rows, int64_t stride,
                                      float scale, uint32_t* flags, hvdc_cuda_error* error,
                                      uint64_t tag, const hvdc_cuda_queue* queue) {
  if (!plan || !plan->decode || !queue) return HVDC_BAD_SPEC;
  if (!Aligned(rows, 16) || stride % 16) return HVDC_CUDA_MISALIGNED;
  DecodeBatch batch = {};
  batch.rows = static_cast<const uint8_t*>(rows);
  batch.stride = stride;
  batch.flags = flags;
  batch.error = error;
  batch.tag = tag;
  batch.scale = scale;
  return RunBatch(*plan->decode, arrays, array_count, batch, *queue);
}
