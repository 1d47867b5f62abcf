// Lookup tables of the 8-bit types.
#ifndef HVDC_CPU_TABLES_H_
#define HVDC_CPU_TABLES_H_

#include "codec/types.h"

namespace hvdc {

// The tables of a variant from HVDC_DYNAMIC on, made when first asked for.
const Int8Tables& GetInt8Tables(uint32_t variant);

}  // namespace hvdc

#endif  // HVDC_CPU_TABLES_H_
