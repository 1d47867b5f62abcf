// Lookup tables of the 8-bit types.
#include "codec/tables.h"

#include "cpu/fp_env.h"
#include "cpu/jobs.h"

namespace hvdc {
namespace {

Int8Tables Build(uint32_t variant) {
  const DefaultFpEnv env;
  Int8Tables tables = {};
  base::BuildInt8Tables(variant, &tables);
  return tables;
}

}  // namespace

const Int8Tables* TablesOf(const hvdc_spec& spec) {
  if (spec.codec != HVDC_INT8 || spec.variant == HVDC_LINEAR) return nullptr;
  static const Int8Tables all[] = {Build(HVDC_DYNAMIC), Build(HVDC_STATIC), Build(HVDC_MANTISSA),
                                   Build(HVDC_E4M3), Build(HVDC_E5M2)};
  return &all[spec.variant - HVDC_DYNAMIC];
}

}  // namespace hvdc
