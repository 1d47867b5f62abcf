// The small functions of the C interface.
#include "codec/layout.h"

extern "C" uint32_t hvdc_abi_version(void) { return HVDC_ABI_VERSION; }

extern "C" int64_t hvdc_payload_bytes(const hvdc_spec* spec) {
  if (!spec || !hvdc::base::ValidSpec(*spec)) return -1;
  return hvdc::base::MakeLayout(*spec).payload_bytes;
}
