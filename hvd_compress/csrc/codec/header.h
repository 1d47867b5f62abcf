// The payload's header: made, and compared with what is expected.
#ifndef HVDC_CODEC_HEADER_H_
#define HVDC_CODEC_HEADER_H_

#include "codec/layout.h"

namespace hvdc {
namespace HVDC_ARCH {

// Everything but the flags and the checksum, which are 0.
HVDC_HD Header MakeHeader(const hvdc_spec& spec, const Layout& layout, uint32_t step) {
  Header header = {};
  header.magic = kMagic;
  header.version = kFormatVersion;
  header.codec = static_cast<uint8_t>(spec.codec);
  header.config_hash = spec.config_hash;
  header.count = static_cast<uint64_t>(layout.count);
  header.step = step;
  return header;
}

// Whether a payload is of this configuration, size and step; flags and checksum are not looked at.
HVDC_HD bool HeaderFits(const hvdc_spec& spec, const Layout& layout, uint32_t step,
                        const Header& header) {
  return header.magic == kMagic && header.version == kFormatVersion && header.codec == spec.codec &&
         header.config_hash == spec.config_hash &&
         header.count == static_cast<uint64_t>(layout.count) && header.step == step;
}

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CODEC_HEADER_H_
