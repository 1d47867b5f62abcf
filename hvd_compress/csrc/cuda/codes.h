// One code of a payload with plain codes, wherever it stands.
#ifndef HVDC_CUDA_CODES_H_
#define HVDC_CUDA_CODES_H_

#include "codec/trits.h"
#include "cuda/grid.h"

namespace hvdc {
namespace HVDC_ARCH {

// Of a codec that has levels.
__device__ inline uint32_t CodeAt(const hvdc_spec& spec, const Blocks& blocks,
                                  const uint8_t* payload, uint32_t element) {
  const uint32_t* const words = reinterpret_cast<const uint32_t*>(payload);
  const uint32_t block = Quotient(blocks.by_size, element);
  const uint32_t position = element - block * blocks.size;
  const uint32_t* const codes = words + CodesOfBlock(blocks, block);
  if (spec.codec == HVDC_TERNARY) {
    const uint32_t size = 4 * WordsOfBlock(blocks, block);
    const uint32_t digit = DigitOf(position, size);
    const uint8_t byte = reinterpret_cast<const uint8_t*>(codes)[position - digit * size];
    const uint16_t rest = PopTrits(byte, digit);
    return FirstTrit(rest, PopTrit(rest));
  }
  uint32_t code = 0;
  for (uint32_t plane = 0; plane < blocks.planes; ++plane) {
    code |= (codes[PlaneWord(blocks, position, plane)] >> position % 32 & 1u) << plane;
  }
  return code;
}

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CUDA_CODES_H_
