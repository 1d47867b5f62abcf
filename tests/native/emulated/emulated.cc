// Threads that take turns, one stack each. See cuda_runtime.h.
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <ucontext.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "cuda_runtime.h"

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulated {
namespace {

constexpr size_t kStack = 256 << 10;
constexpr unsigned kWarp = 32;
constexpr size_t kGuard = 256;
constexpr uint8_t kGuardByte = 0x5A;

[[noreturn]] void Fail(const char* what) {
  fprintf(stderr, "emulated CUDA: %s (block %u, thread %u)\n", what, blockIdx.x, threadIdx.x);
  abort();
}

// Those who wait for each other.
struct Circle {
  Meeting meeting = Meeting::kNone;
  unsigned arrived = 0;
  uint64_t round = 0;
};

struct Warp : Circle {
  uint64_t brought[kWarp] = {}, results[kWarp] = {};
};

// A stack, and where its execution goes on. It runs one block's thread after another.
struct Fiber {
  ucontext_t context;
  jmp_buf place;
  bool started = false;
  std::unique_ptr<char[]> stack;
  bool done = true;
};

struct Machine {
  int device = 0;
  int processors = 1;
  long launches = 0;
  unsigned seed = 0;  // of the order of turns; 0: from the first to the last, 1: backwards
  Fiber scheduler;
  std::deque<Fiber> fibers;  // contexts point into themselves, and must not move
  std::vector<Warp> warps;
  Circle block;
  unsigned threads = 0, alive = 0;
  uint64_t events = 0;  // meetings that took place, and threads that ended
  Body body = nullptr;
  void* context = nullptr;
  uint8_t* shared = nullptr;
} machine;

// Goes on in another stack. AddressSanitizer follows swapcontext, but each is two system calls,
// which take longer than what most threads do in between; jumps take none.
#if defined(__SANITIZE_ADDRESS__)
void Switch(Fiber* from, Fiber* to) {
  if (swapcontext(&from->context, &to->context)) Fail("swapcontext");
}
#else
__attribute__((noinline)) void Switch(Fiber* from, Fiber* to) {
  if (_setjmp(from->place)) return;
  if (to->started) _longjmp(to->place, 1);
  to->started = true;
  setcontext(&to->context);
  Fail("setcontext");
}
#endif

void GiveWay() {
  const dim3 me = threadIdx;
  Switch(&machine.fibers[me.x], &machine.scheduler);
  threadIdx = me;
}

// Returns when the circle is complete; release is called by whoever completes it.
template <class Release>
void Meet(Circle* circle, Meeting meeting, bool complete, const Release& release) {
  if (circle->meeting != Meeting::kNone && circle->meeting != meeting) {
    Fail("threads that should meet are at different places");
  }
  circle->meeting = meeting;
  if (complete) {
    release();
    circle->meeting = Meeting::kNone;
    circle->arrived = 0;
    ++circle->round;
    ++machine.events;
    return;
  }
  const uint64_t round = circle->round;
  while (circle->round == round) GiveWay();
}

void Enter() {
  while (true) {
    machine.body(machine.context);
    machine.fibers[threadIdx.x].done = true;
    --machine.alive;
    ++machine.events;
    GiveWay();
  }
}

std::vector<unsigned> Order(unsigned count, unsigned salt) {
  std::vector<unsigned> order(count);
  std::iota(order.begin(), order.end(), 0u);
  if (machine.seed == 1) std::reverse(order.begin(), order.end());
  if (machine.seed > 1) std::shuffle(order.begin(), order.end(), std::mt19937(machine.seed + salt));
  return order;
}

void Make(Fiber* fiber) {
  fiber->stack.reset(new char[kStack]);
  if (getcontext(&fiber->context)) Fail("getcontext");
  fiber->context.uc_stack.ss_sp = fiber->stack.get();
  fiber->context.uc_stack.ss_size = kStack;
  fiber->context.uc_link = nullptr;
  makecontext(&fiber->context, Enter, 0);
}

void RunBlock(size_t shared) {
  // Between guards, and full of what no kernel may count on.
  std::vector<uint8_t> memory(shared + 2 * kGuard + 16, 0xA5);
  machine.shared = memory.data() + kGuard;
  machine.shared += (16 - reinterpret_cast<uintptr_t>(machine.shared) % 16) % 16;
  std::fill(memory.data(), machine.shared, kGuardByte);
  std::fill(machine.shared + shared, memory.data() + memory.size(), kGuardByte);
  machine.warps.assign(machine.threads / kWarp, Warp());
  machine.block = Circle();
  machine.alive = machine.threads;
  for (unsigned i = 0; i < machine.threads; ++i) machine.fibers[i].done = false;
  const std::vector<unsigned> order = Order(machine.threads, blockIdx.x);
  while (machine.alive) {
    const uint64_t before = machine.events;
    for (const unsigned i : order) {
      if (machine.fibers[i].done) continue;
      threadIdx = dim3(i, 0, 0);
      Switch(&machine.scheduler, &machine.fibers[i]);
    }
    if (machine.events == before) Fail("threads wait for others that never come");
  }
  const auto altered = [](uint8_t byte) { return byte != kGuardByte; };
  if (std::any_of(memory.data(), machine.shared, altered) ||
      std::any_of(machine.shared + shared, memory.data() + memory.size(), altered)) {
    Fail("a write outside of the shared memory");
  }
}

}  // namespace

uint8_t* DynamicShared() { return machine.shared; }

const uint64_t* MeetWarp(Meeting meeting, unsigned mask, uint64_t value) {
  Warp* const warp = &machine.warps[threadIdx.x / kWarp];
  const unsigned lane = threadIdx.x % kWarp;
  if (!(mask >> lane & 1)) Fail("a thread that its own mask leaves out");
  warp->brought[lane] = value;
  warp->arrived |= 1u << lane;
  Meet(warp, meeting, warp->arrived == mask,
       [warp] { std::copy(warp->brought, warp->brought + kWarp, warp->results); });
  return warp->results;
}

void MeetBlock() {
  ++machine.block.arrived;
  Meet(&machine.block, Meeting::kBlock, machine.block.arrived == machine.threads, [] {});
}

void RunGrid(dim3 grid, dim3 block, size_t shared, Body body, void* context) {
  while (machine.fibers.size() < block.x) {
    machine.fibers.emplace_back();
    Make(&machine.fibers.back());
  }
  machine.scheduler.started = true;
  ++machine.launches;
  machine.threads = block.x;
  machine.body = body;
  machine.context = context;
  gridDim = grid;
  blockDim = block;
  for (const unsigned i : Order(grid.x, 0)) {
    blockIdx = dim3(i, 0, 0);
    RunBlock(shared);
  }
}

}  // namespace emulated

cudaError_t cudaGetDevice(int* device) {
  *device = emulated::machine.device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  emulated::machine.device = device;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = emulated::machine.processors;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
  memset(memory, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t) {
  memcpy(to, from, bytes);
  return cudaSuccess;
}

// The number of grids that have run.
extern "C" __attribute__((visibility("default"))) long hvdc_emulated_launches(void) {
  return emulated::machine.launches;
}

// The number of the device's processors, and the order in which threads and blocks take turns.
extern "C" __attribute__((visibility("default"))) void hvdc_emulated_configure(int processors,
                                                                               unsigned seed) {
  emulated::machine.processors = processors;
  emulated::machine.seed = seed;
}
