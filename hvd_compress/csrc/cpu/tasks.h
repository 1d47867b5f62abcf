// The blocks of many tensors as one list of tasks, so that threads share small tensors as well as
// large ones.
#ifndef HVDC_CPU_TASKS_H_
#define HVDC_CPU_TASKS_H_

#include "codec/layout.h"
#include "cpu/scratch.h"
#include "cpu/thread_pool.h"

namespace hvdc {

// Elements of a task: enough to hide its cost, few enough for the cache. Chunks of entropy-coded
// codes have more.
constexpr int64_t kTaskElements = 16384;

// A task is some blocks that follow each other, of one tensor or of several. Job: EncodeJob or
// DecodeJob.
template <class Job>
class Tasks {
 public:
  Tasks(const Job* jobs, int64_t tensors)
      : jobs_(jobs), starts_(MostTasks(jobs, tensors) + 1, Buffer<Start>::Fill::kNone) {
    if (!starts_) return;
    int64_t room = 0;  // elements that the last task still takes
    for (int64_t tensor = 0; tensor < tensors; ++tensor) {
      const Layout& layout = jobs[tensor].layout;
      const int64_t unit = layout.chunk * layout.block;  // is not cut
      const int64_t longest = unit < layout.count ? unit : base::RoundUp(layout.count, kTile);
      if (layout.block > largest_block_) largest_block_ = layout.block;
      if (layout.chunk > 1 && longest > largest_block_) largest_block_ = longest;
      for (int64_t block = 0; block < layout.blocks;) {
        if (room <= 0) {
          starts_[count_++] = {tensor, block};
          room = kTaskElements;
        }
        const int64_t rest = layout.count - block * layout.block;
        if (rest <= room) {
          room -= rest;
          break;
        }
        const int64_t some = (room + unit - 1) / unit;
        room -= some * unit;
        block += some * layout.chunk;
      }
    }
    starts_[count_] = {tensors, 0};
  }

  explicit operator bool() const { return static_cast<bool>(starts_); }
  int64_t count() const { return count_; }
  int64_t largest_block() const { return largest_block_; }

  // Calls body(tensor, first, last, worker) for ranges that cover the blocks of all tensors, in
  // parallel.
  template <class Body>
  void Run(int threads, const Body& body) const {
    ParallelFor(count_, 1, threads, [&](int64_t begin, int64_t end, int worker) {
      for (int64_t task = begin; task < end; ++task) {
        const Start from = starts_[task], to = starts_[task + 1];
        for (int64_t tensor = from.tensor; tensor <= to.tensor; ++tensor) {
          const int64_t first = tensor == from.tensor ? from.block : 0;
          const int64_t last = tensor == to.tensor ? to.block : jobs_[tensor].layout.blocks;
          if (first < last) body(tensor, first, last, worker);
        }
      }
    });
  }

 private:
  struct Start {
    int64_t tensor, block;
  };

  // Every task but the last one is full.
  static int64_t MostTasks(const Job* jobs, int64_t tensors) {
    int64_t elements = 0;
    for (int64_t i = 0; i < tensors; ++i) elements += jobs[i].layout.count;
    return elements / kTaskElements + 1;
  }

  const Job* const jobs_;
  const Buffer<Start> starts_;
  int64_t count_ = 0, largest_block_ = 0;
};

}  // namespace hvdc

#endif  // HVDC_CPU_TASKS_H_
