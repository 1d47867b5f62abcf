// The choice of the instruction set whose kernels run.
#include <stdlib.h>
#include <string.h>

#include <atomic>

#include "cpu/kernels.h"

#if defined(__x86_64__) && !defined(HVDC_PLAIN_ONLY)
#define HVDC_HAS_X86 1
#include <cpuid.h>
#endif

namespace hvdc {
namespace {

#if defined(HVDC_HAS_X86)

// Whether the operating system saves these parts of the registers.
bool SystemSaves(uint32_t state) {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & state) == state;
}

// Exactly what CMakeLists.txt lets the compiler use.
void Detect(bool* avx2, bool* avx512) {
  *avx2 = *avx512 = false;
  uint32_t a, b, c, d, b7, c7, d7;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return;
  constexpr uint32_t kNeeded = bit_OSXSAVE | bit_AVX | bit_F16C | bit_POPCNT;
  if ((c & kNeeded) != kNeeded || !SystemSaves(0x6)) return;
  if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d7)) return;
  *avx2 = (b7 & bit_AVX2) && (b7 & bit_BMI2);
  constexpr uint32_t kWide = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
  *avx512 = *avx2 && (b7 & kWide) == kWide && SystemSaves(0xE6);
}

#endif

// Null where the machine lacks it, or there is no such name.
const Kernels* Find(const char* name) {
  if (!strcmp(name, "plain")) return &kPlainKernels;
#if defined(HVDC_HAS_X86)
  bool avx2, avx512;
  Detect(&avx2, &avx512);
  if (avx2 && !strcmp(name, "avx2")) return &kAvx2Kernels;
  if (avx512 && !strcmp(name, "avx512")) return &kAvx512Kernels;
#endif
  return nullptr;
}

const Kernels* Best() {
  const Kernels* found = Find("avx512");
  if (!found) found = Find("avx2");
  return found ? found : &kPlainKernels;
}

// Null where the environment names an instruction set that the machine lacks, or none at all.
const Kernels* Wanted() {
  const char* name = getenv("HVDC_ISA");
  return name && *name ? Find(name) : Best();
}

std::atomic<const Kernels*> current{nullptr};

}  // namespace

const Kernels& CurrentKernels() {
  const Kernels* kernels = current.load(std::memory_order_acquire);
  if (!kernels) {
    const Kernels* first = Wanted();
    if (!first) first = Best();
    if (current.compare_exchange_strong(kernels, first)) kernels = first;
  }
  return *kernels;
}

}  // namespace hvdc

extern "C" const char* hvdc_isa(void) {
  if (!hvdc::current.load(std::memory_order_acquire) && !hvdc::Wanted()) return nullptr;
  return hvdc::CurrentKernels().name;
}

extern "C" int hvdc_set_isa(const char* name) {
  const hvdc::Kernels* kernels = name ? hvdc::Find(name) : nullptr;
  if (!kernels) return HVDC_BAD_SPEC;
  hvdc::current.store(kernels, std::memory_order_release);
  return HVDC_OK;
}
