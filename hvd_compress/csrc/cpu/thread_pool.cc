#include "cpu/thread_pool.h"

#include <pthread.h>
#include <signal.h>

#include <condition_variable>
#include <exception>
#include <mutex>
#include <new>
#include <thread>

#include "cpu/fp_env.h"

namespace hvdc {
namespace {

class Pool {
 public:
  explicit Pool(Pool* before) : before_(before) {}

  // Whether the pool was free; else nothing has been done.
  bool TryRun(int threads, void (*work)(void*, int), void* argument) {
    const std::unique_lock<std::mutex> alone(caller_, std::try_to_lock);
    if (!alone.owns_lock()) return false;
    Grow(threads - 1);
    {
      const std::lock_guard<std::mutex> lock(state_);
      work_ = work;
      argument_ = argument;
      joined_ = 0;
      wanted_ = threads - 1 < workers_ ? threads - 1 : workers_;
    }
    wake_.notify_all();
    work(argument, 0);
    std::unique_lock<std::mutex> lock(state_);
    wanted_ = 0;  // whoever has not woken up by now finds nothing left
    done_.wait(lock, [this] { return active_ == 0; });
    return true;
  }

  Pool* before() const { return before_; }

 private:
  void Grow(int workers) {
    if (workers_ >= workers) return;
    // Signals are for the application's own threads.
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    try {
      for (; workers_ < workers; ++workers_) std::thread([this] { Serve(); }).detach();
    } catch (const std::exception&) {
      // No more threads can be had, or no memory for them: those that there are do the work.
    }
    pthread_sigmask(SIG_SETMASK, &old, nullptr);
  }

  void Serve() {
    std::unique_lock<std::mutex> lock(state_);
    for (;;) {
      wake_.wait(lock, [this] { return wanted_ > 0; });
      --wanted_;
      ++active_;
      const int worker = ++joined_;
      lock.unlock();
      {
        const DefaultFpEnv env;
        work_(argument_, worker);
      }
      lock.lock();
      if (--active_ == 0) done_.notify_one();
    }
  }

  std::mutex caller_;  // held by the one caller that the pool works for
  int workers_ = 0;    // guarded by caller_
  std::mutex state_;   // guards what follows
  std::condition_variable wake_, done_;
  void (*work_)(void*, int) = nullptr;
  void* argument_ = nullptr;
  int wanted_ = 0, joined_ = 0, active_ = 0;
  Pool* const before_;  // what a child of fork() left behind, so that it stays reachable
};

// Pools are never destroyed: their threads may outlive main().
std::atomic<Pool*> current{nullptr};
std::atomic<Pool*> left_behind{nullptr};

// fork() copies the pool's memory, but none of its threads, and perhaps a locked mutex.
void AfterForkInChild() {
  if (Pool* pool = current.exchange(nullptr)) left_behind.store(pool);
}

Pool* CurrentPool() {
  Pool* pool = current.load(std::memory_order_acquire);
  if (pool) return pool;
  static const int registered = pthread_atfork(nullptr, nullptr, AfterForkInChild);
  (void)registered;
  Pool* fresh = new (std::nothrow) Pool(left_behind.load());
  if (fresh && current.compare_exchange_strong(pool, fresh)) return fresh;
  delete fresh;  // another thread was faster, or there is no memory
  return pool;
}

}  // namespace

void RunOnPool(int threads, void (*work)(void* argument, int worker), void* argument) {
  const DefaultFpEnv env;
  if (threads > 1) {
    Pool* pool = CurrentPool();
    if (pool && pool->TryRun(threads, work, argument)) return;
  }
  work(argument, 0);
}

}  // namespace hvdc
