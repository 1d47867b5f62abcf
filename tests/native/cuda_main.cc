// The CUDA kernels on the host beside the CPU's, for random batches of every kind of configuration,
// in buffers of exact size: the same bytes, and nothing read or written beside them. To be run
// under sanitizers.
//
//   cuda_main SECONDS [SEED]
//
// SECONDS are of processor time, so that it does as much on a machine that is busy.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include "cases.h"
#include "cuda/jobs.h"
#include "hvdc_cuda.h"

extern "C" void hvdc_emulated_configure(int processors, unsigned seed);

namespace {

using Random = std::mt19937_64;

#define DEMAND(condition)                                             \
  do {                                                                \
    if (!(condition)) {                                               \
      fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      abort();                                                        \
    }                                                                 \
  } while (0)

// Memory of exact size, as far from an aligned address as its type allows.
struct Memory {
  Memory(int64_t size_, int64_t alignment, int64_t offset)
      : size(size_),
        all(aligned_alloc(256, static_cast<size_t>((size_ + offset + 255) / 256 * 256))) {
    // The memory ends with the allocation, so that what lies behind is not its own, and starts
    // where the alignment allows it.
    const int64_t room = (size + offset + 255) / 256 * 256;
    data = static_cast<uint8_t*>(all) + (room - size) / alignment * alignment;
  }
  ~Memory() { free(all); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  int64_t size;
  void* all;
  uint8_t* data;
};

bool SameNumbers(const Memory& a, const Memory& b, int dtype) {
  const auto nan = [dtype](const uint8_t* at) {
    uint32_t bits = 0;
    memcpy(&bits, at, dtype == HVDC_DTYPE_FLOAT32 ? 4 : 2);
    if (dtype == HVDC_DTYPE_FLOAT32) return (bits & 0x7FFFFFFFu) > 0x7F800000u;
    return (bits & 0x7FFFu) > (dtype == HVDC_DTYPE_FLOAT16 ? 0x7C00u : 0x7F80u);
  };
  const int64_t width = dtype == HVDC_DTYPE_FLOAT32 ? 4 : 2;
  for (int64_t i = 0; i < a.size; i += width) {
    if (nan(a.data + i) && nan(b.data + i)) continue;
    if (memcmp(a.data + i, b.data + i, static_cast<size_t>(width))) return false;
  }
  return true;
}

void Copy(const Memory& from, Memory* to) {
  memcpy(to->data, from.data, static_cast<size_t>(from.size));
}

void FillNumbers(Random* random, int dtype, bool anything, Memory* memory) {
  std::normal_distribution<float> normal;
  const float size = std::ldexp(1.0f, static_cast<int>((*random)() % 250) - 125);
  for (int64_t i = 0; i < memory->size; i += dtype == HVDC_DTYPE_FLOAT32 ? 4 : 2) {
    const float value = size * normal(*random);
    const uint16_t half =
        static_cast<uint16_t>(0x3800 + (*random)() % 0x800 + ((*random)() & 0x8000));
    const uint32_t bits = static_cast<uint32_t>((*random)());
    if (dtype == HVDC_DTYPE_FLOAT32) {
      memcpy(memory->data + i, anything ? static_cast<const void*>(&bits) : &value, 4);
    } else {
      memcpy(memory->data + i, anything ? static_cast<const void*>(&bits) : &half, 2);
    }
  }
}

cases::Case RandomCase(Random* random) {
  uint8_t bytes[cases::kSpecBytes];
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>((*random)());
  cases::Case test = cases::MakeCase(bytes);
  if ((*random)() % 4 == 0) test.spec.group = 64u * static_cast<uint32_t>(1 + (*random)() % 130);
  if ((*random)() % 8 == 0) {
    static const uint32_t kBits[] = {1, 2, 5, 8, 32};
    test.spec.codec = HVDC_TOPK;
    test.spec.grouping = HVDC_CONTIGUOUS;
    test.spec.variant = kBits[(*random)() % 5];
    const bool dense = (*random)() % 4 == 0;
    test.spec.levels = static_cast<uint32_t>(1 + (*random)() % (dense ? test.spec.group : 64));
  }
  if (test.spec.codec == HVDC_ECQ && test.spec.variant == HVDC_ROTATED_LINF) {
    test.spec.variant = HVDC_LINF;  // Only the CPU rotates.
  }
  if (test.spec.coding) {  // Only the CPU has an entropy code.
    test.spec.coding = HVDC_PLAIN;
    test.spec.rows %= 2500;
    test.spec.columns = 1;
  }
  return test;
}

// A tensor of a batch; everything twice, for the CPU and for the device.
struct BatchTensor {
  cases::Case test;
  bool feedback;
  int kept;  // the dtype of the residual
  std::unique_ptr<Memory> gradient, before, h0, h1, o0, o1;
};

void CheckBatch(Random* random) {
  const size_t count = (*random)() % 2 ? 1 : (*random)() % 5;
  const int32_t ranks = static_cast<int32_t>(1 + (*random)() % 3);
  std::vector<BatchTensor> all(count);
  std::vector<hvdc_tensor> tensors(count);
  std::vector<hvdc_cuda_entry> entries(count);
  std::vector<hvdc_cuda_array> arrays(count);
  std::vector<hvdc_cuda_residual> residuals;
  int64_t end = 0;
  for (size_t i = 0; i < count; ++i) {
    BatchTensor& one = all[i];
    one.test = RandomCase(random);
    one.feedback = (*random)() % 2;
    const int64_t numbers = one.test.spec.rows * one.test.spec.columns;
    const int64_t width = one.test.dtype == HVDC_DTYPE_FLOAT32 ? 4 : 2;
    const auto memory = [&](int64_t size, int64_t each) {
      const int64_t slack = static_cast<int64_t>((*random)() % 4) * each;
      return std::make_unique<Memory>(size, each, slack);
    };
    one.gradient = memory(numbers * width, width);
    one.o0 = memory(numbers * width, width);
    one.o1 = memory(numbers * width, width);
    FillNumbers(random, one.test.dtype, (*random)() % 6 == 0, one.gradient.get());
    one.kept = (*random)() % 2 ? HVDC_DTYPE_FLOAT32 : HVDC_DTYPE_BFLOAT16;
    const int64_t each = one.kept == HVDC_DTYPE_FLOAT32 ? 4 : 2;
    for (auto* residual : {&one.before, &one.h0, &one.h1}) {
      *residual = memory(one.feedback ? each * numbers : 0, each);
    }
    FillNumbers(random, one.kept, false, one.before.get());
    const float alpha = (*random)() % 2 ? 1.0f : 0.25f, beta = (*random)() % 2 ? 1.0f : 0.5f;
    const hvdc_noise noise = {7, 1, static_cast<uint32_t>(i), 0, cases::kStep};
    end += 16 * static_cast<int64_t>((*random)() % 2);
    hvdc_tensor& tensor = tensors[i];
    tensor = {};
    tensor.spec = one.test.spec;
    tensor.noise = noise;
    tensor.values = one.gradient->data;
    if (one.feedback) {
      tensor.residual = one.before->data;
      tensor.next_residual = one.h0->data;
      tensor.residual_dtype = one.kept;
    }
    tensor.alpha = alpha;
    tensor.beta = beta;
    tensor.offset = end;
    tensor.payload_bytes = hvdc_payload_bytes(&one.test.spec);
    tensor.dtype = one.test.dtype;
    entries[i] = {one.test.spec,           noise, alpha, beta,     one.feedback,
                  static_cast<int32_t>(i), 0,     end,   one.kept, 0};
    arrays[i] = {one.gradient->data, nullptr, nullptr, cases::kStep, one.test.dtype, 0};
    if (one.feedback) {
      arrays[i].residual = (*random)() % 2 ? one.h1->data : one.before->data;
      arrays[i].next_residual = one.h1->data;
      residuals.push_back({one.before->data, one.h1->data, numbers, one.kept, 0});
    }
    end += tensor.payload_bytes;
  }

  hvdc_emulated_configure(1 + static_cast<int>((*random)() % 3),
                          static_cast<unsigned>((*random)() % 4));
  const int64_t number = static_cast<int64_t>(count);
  hvdc_cuda_plan *encode, *decode;
  DEMAND(hvdc_cuda_plan_encode(entries.data(), number, 0, &encode) == HVDC_OK);
  DEMAND(hvdc_cuda_plan_decode(entries.data(), number, ranks, 0, &decode) == HVDC_OK);
  Memory m0(hvdc_cuda_plan_bytes(encode), 256, 0), m1(hvdc_cuda_plan_bytes(decode), 256, 0);
  memset(m0.data, 0xA5, static_cast<size_t>(m0.size));
  memset(m1.data, 0xA5, static_cast<size_t>(m1.size));
  const hvdc_cuda_queue queue = {0, 0, nullptr};
  DEMAND(hvdc_cuda_plan_prepare(encode, m0.data, &queue) == HVDC_OK);
  DEMAND(hvdc_cuda_plan_prepare(decode, m1.data, &queue) == HVDC_OK);

  Memory p0(end, 16, 0), p1(end * ranks, 16, 0);
  memset(p0.data, 0x11, static_cast<size_t>(p0.size));
  memset(p1.data, 0x11, static_cast<size_t>(p1.size));
  for (int32_t rank = 0; rank < ranks; ++rank) {
    // A byte that both leave out differs.
    for (const hvdc_tensor& tensor : tensors) {
      memset(p1.data + rank * end + tensor.offset, 0x22, static_cast<size_t>(tensor.payload_bytes));
    }
  }
  DEMAND(hvdc_encode_batch(tensors.data(), number, p0.data, 1, nullptr) == HVDC_OK);
  for (int32_t rank = 0; rank < ranks; ++rank) {
    for (size_t i = 0; i < count; ++i) {
      if (arrays[i].residual == all[i].h1->data) Copy(*all[i].before, all[i].h1.get());
    }
    DEMAND(hvdc_cuda_encode_batch(encode, arrays.data(), number, p1.data + rank * end, &queue) ==
           HVDC_OK);
    DEMAND(!memcmp(p0.data, p1.data + rank * end, static_cast<size_t>(end)));
  }
  for (const uint32_t when : {0u, 1u}) {
    DEMAND(hvdc_cuda_restore(residuals.data(), static_cast<int64_t>(residuals.size()), &when,
                             &queue) == HVDC_OK);
    for (const BatchTensor& one : all) {
      DEMAND(SameNumbers(when ? *one.before : *one.h0, *one.h1, one.kept));
    }
  }
  for (size_t i = 0; i < count; ++i) {
    tensors[i].values = all[i].o0->data;
    arrays[i].values = all[i].o1->data;
  }

  hvdc_cuda_error error = {};
  uint32_t flags = 0, found = 0;
  const auto sum = [&](uint64_t tag) {
    DEMAND(hvdc_cuda_decode_batch(decode, arrays.data(), number, p1.data, end, 0.3f, &flags, &error,
                                  tag, &queue) == HVDC_OK);
  };
  DEMAND(hvdc_decode_batch(tensors.data(), number, p1.data, end, ranks, 0.3f, 1, nullptr,
                           nullptr) == HVDC_OK);
  sum(50);
  DEMAND(error.status == HVDC_OK);
  for (size_t i = 0; i < count; ++i) {
    DEMAND(SameNumbers(*all[i].o0, *all[i].o1, all[i].test.dtype));
    found |= tensors[i].flags;
  }
  DEMAND(flags == found);
  if (count) {
    // Altered anywhere in a payload: found, and the same kernels go on as if nothing had been.
    const size_t altered = (*random)() % count;
    const int32_t rank = static_cast<int32_t>((*random)() % static_cast<uint64_t>(ranks));
    uint8_t* const payload = p1.data + rank * end + tensors[altered].offset;
    payload[(*random)() % static_cast<uint64_t>(tensors[altered].payload_bytes)] ^=
        static_cast<uint8_t>(1 << (*random)() % 8);
    sum(70);
    DEMAND(error.status != HVDC_OK && error.payload == rank && error.tag == 70 + altered);
    error.status = HVDC_OK;
    // Any bytes at all may be refused, but not followed.
    for (int64_t i = 32; i < p1.size; ++i) p1.data[i] = static_cast<uint8_t>((*random)());
    sum(90);
  }
  hvdc_cuda_plan_free(encode);
  hvdc_cuda_plan_free(decode);
}

// Shortcuts give what they stand for.
void CheckArithmetic(Random* random) {
  using namespace hvdc::HVDC_ARCH;
  for (int i = 0; i < 100000; ++i) {
    const uint32_t divisor =
        2 + static_cast<uint32_t>((*random)() >> (33 + (*random)() % 31)) % 0x7FFFFFFEu;
    const uint32_t number = static_cast<uint32_t>((*random)() >> (33 + (*random)() % 31));
    const uint32_t multiple = number / divisor * divisor;
    const hvdc::Divider divider = MakeDivider(divisor);
    for (const uint32_t n : {number, multiple, multiple ? multiple - 1 : 0u, 0x7FFFFFFFu}) {
      DEMAND(Quotient(divider, n) == n / divisor);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? atof(argv[1]) : 10;
  Random random(argc > 2 ? strtoull(argv[2], nullptr, 10) : 1);
  CheckArithmetic(&random);
  const clock_t end = clock() + static_cast<clock_t>(seconds * CLOCKS_PER_SEC);
  long runs = 0;
  for (; clock() < end; ++runs) CheckBatch(&random);
  printf("%ld batches\n", runs);
  return runs ? 0 : 1;
}
