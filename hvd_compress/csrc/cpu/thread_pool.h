// A small persistent pool of threads that survives fork().
#ifndef HVDC_CPU_THREAD_POOL_H_
#define HVDC_CPU_THREAD_POOL_H_

#include <stdint.h>

#include <atomic>

namespace hvdc {

constexpr int kMaxThreads = 256;

// Calls work(argument, worker) on the calling thread, as worker 0, and on up to threads - 1 others
// at the same time, as workers 1, 2, ...; returns when all of them have. Fewer others take part
// where they wake up late, or where another caller has the pool: then the caller works alone.
void RunOnPool(int threads, void (*work)(void* argument, int worker), void* argument);

// Calls body(begin, end, worker) for ranges of grain that cover [0, count), in parallel.
template <class Body>
void ParallelFor(int64_t count, int64_t grain, int threads, const Body& body) {
  struct Shared {
    std::atomic<int64_t> next;
    int64_t count, grain;
    const Body* body;
  } shared{{0}, count, grain, &body};
  const auto work = [](void* argument, int worker) {
    Shared* all = static_cast<Shared*>(argument);
    for (;;) {
      const int64_t begin = all->next.fetch_add(all->grain, std::memory_order_relaxed);
      if (begin >= all->count) return;
      const int64_t rest = all->count - begin;
      (*all->body)(begin, begin + (rest < all->grain ? rest : all->grain), worker);
    }
  };
  const int64_t tasks = (count + grain - 1) / grain;
  RunOnPool(static_cast<int>(tasks < threads ? tasks : threads), work, &shared);
}

}  // namespace hvdc

#endif  // HVDC_CPU_THREAD_POOL_H_
