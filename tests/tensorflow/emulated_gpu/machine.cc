#include "machine.h"

#include <execinfo.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <utility>

namespace emulated_gpu {
namespace {

constexpr size_t kArena = size_t{1} << 30, kAlignment = 256;
constexpr int kGarbage = 0xA5;

// Says who crashed.
void Tell(int, siginfo_t*, void*) {
  constexpr char kWhat[] = "emulated GPU: a crash, perhaps of the host in its memory:\n";
  if (write(STDERR_FILENO, kWhat, sizeof(kWhat) - 1) < 0) _exit(1);
  void* frames[32];
  backtrace_symbols_fd(frames, backtrace(frames, 32), STDERR_FILENO);
  _exit(1);
}

unsigned char* Reserve() {
  void* const memory =
      mmap(nullptr, kArena, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) abort();
  struct sigaction action = {};
  action.sa_sigaction = Tell;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &action, nullptr);
  return static_cast<unsigned char*>(memory);
}

}  // namespace

Machine& Machine::Get() {
  static Machine* const machine = new Machine;  // its thread never ends
  return *machine;
}

Machine::Machine() : arena_(Reserve()), worker_([this] { Run(); }) { worker_.detach(); }

void Machine::Put(std::function<void()> work) {
  const std::lock_guard<std::mutex> lock(mutex_);
  waiting_.push_back(std::move(work));
  changed_.notify_all();
}

void Machine::Wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return waiting_.empty() && !busy_; });
}

void* Machine::Allocate(size_t bytes) {
  bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  void* memory;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = free_.find(bytes);
    if (found != free_.end()) {
      memory = found->second;
      free_.erase(found);
    } else {
      if (used_ + bytes > kArena) return nullptr;
      memory = arena_ + used_;
      used_ += bytes;
    }
    sizes_[memory] = bytes;
  }
  Put([memory, bytes] { memset(memory, kGarbage, bytes); });
  return memory;
}

void Machine::Free(void* memory) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto size = sizes_.find(memory);
  if (size == sizes_.end()) abort();
  free_.emplace(size->second, memory);
  sizes_.erase(size);
}

void Machine::Run() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return !waiting_.empty(); });
    std::function<void()> work = std::move(waiting_.front());
    waiting_.pop_front();
    busy_ = true;
    lock.unlock();
    if (mprotect(arena_, kArena, PROT_READ | PROT_WRITE)) abort();
    work();
    if (mprotect(arena_, kArena, PROT_NONE)) abort();
    work = nullptr;
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }
}

}  // namespace emulated_gpu
