// A GPU on the host, as far as an operation can tell: memory that the host cannot touch, and work
// that is done later, in the order in which it was given, by a thread of its own.
#ifndef HVDC_TESTS_EMULATED_GPU_MACHINE_H_
#define HVDC_TESTS_EMULATED_GPU_MACHINE_H_

#include <stddef.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <unordered_map>

namespace emulated_gpu {

class Machine {
 public:
  static Machine& Get();

  // Puts work behind all other work, and returns. Only work can touch the memory.
  void Put(std::function<void()> work);

  // Waits until all work that has been put is done.
  void Wait();

  // Memory full of garbage. Freed memory may be given away at once, though work that uses it is yet
  // to be done: whoever gets it can only use it behind that.
  void* Allocate(size_t bytes);
  void Free(void* memory);

 private:
  Machine();
  [[noreturn]] void Run();

  unsigned char* const arena_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> waiting_;
  bool busy_ = false;
  size_t used_ = 0;
  std::multimap<size_t, void*> free_;  // by size
  std::unordered_map<void*, size_t> sizes_;
  std::thread worker_;
};

}  // namespace emulated_gpu

#endif  // HVDC_TESTS_EMULATED_GPU_MACHINE_H_
