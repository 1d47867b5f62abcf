// Checks what a state of the entropy code becomes against the division that defines it.
//
//   rans_main [STEP]
//
// For each frequency, and for quotients that are STEP apart, it checks the lowest and the highest
// state with that quotient. The computed quotient never falls as the state grows, so that a STEP of
// 1 checks every state.
#include <stdio.h>
#include <stdlib.h>

#include "codec/rans.h"
#include "simd/plain.h"

namespace {

using hvdc::kLanes;
using hvdc::kRansPrecision;
using hvdc::kRansTotal;
using hvdc::base::Plain;
using Step = hvdc::base::RansStep<Plain>;

constexpr uint32_t kQuotients = 1u << (32 - kRansPrecision);

struct Code {
  uint32_t frequency, start;
  hvdc::RansEncodeTable table;
};

uint64_t Expected(const Code& code, uint64_t x) {
  return x / code.frequency * kRansTotal + code.start + x % code.frequency;
}

// The states of the lanes take the code in.
Plain::I Push(const Code& code, Plain::I states) {
  const Plain::F inverse = Plain::FromBits(Plain::SetI(code.table.inverse[0]));
  return Step::Push(states, inverse, Plain::SetI(code.table.slots[0]));
}

// States that have no room for the code are told from those that have.
bool RightRoom(const Code& code) {
  const uint64_t limit = uint64_t{code.frequency} * kQuotients;
  const Plain::I slots = Plain::SetI(code.table.slots[0]);
  if (Plain::Count(Step::Full(Plain::SetI(static_cast<uint32_t>(limit - 1)), slots))) return false;
  if (limit >> 32) return true;
  return Plain::Count(Step::Full(Plain::SetI(static_cast<uint32_t>(limit)), slots)) == kLanes;
}

bool RightStates(const Code& code, uint32_t step) {
  constexpr int kPairs = kLanes / 2;
  const uint32_t next_row = step * kPairs;
  for (uint32_t first = code.frequency % step; first < kQuotients; first += next_row) {
    Plain::I states;
    for (int l = 0; l < kLanes; ++l) {
      uint32_t quotient = first + step * static_cast<uint32_t>(l / 2);
      if (quotient >= kQuotients) quotient = kQuotients - 1;
      states.v[l] = quotient * code.frequency + (l % 2 ? code.frequency - 1 : 0);
    }
    const Plain::I next = Push(code, states);
    for (int l = 0; l < kLanes; ++l) {
      if (next.v[l] == Expected(code, states.v[l])) continue;
      printf("frequency %u, start %u, state %u: expected %llu, got %u\n", code.frequency,
             code.start, states.v[l], static_cast<unsigned long long>(Expected(code, states.v[l])),
             next.v[l]);
      return false;
    }
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  const uint32_t step = argc > 1 ? static_cast<uint32_t>(atoi(argv[1])) : 1021;
  for (uint32_t frequency = 1; frequency <= kRansTotal; ++frequency) {
    Code code = {frequency, (kRansTotal - frequency) / 3 * 2, {}};
    hvdc::base::SetRansCode(&code.table, 0, frequency, code.start);
    if (!RightRoom(code)) {
      printf("frequency %u: wrong room\n", frequency);
      return 1;
    }
    if (!RightStates(code, step)) return 1;
  }
  printf("%u frequencies\n", kRansTotal);
  return 0;
}
