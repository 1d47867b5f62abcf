// What undoes the update of a residual.
#ifndef HVD_COMPRESS_TENSORFLOW_OPS_ROLLBACK_H_
#define HVD_COMPRESS_TENSORFLOW_OPS_ROLLBACK_H_

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"

namespace hvd_compress {

// Whether a residual is rolled back in any case, or if a payload of the step turns out to be
// flagged: only a device knows.
enum class When { kNow, kIfFlagged };

// Takes the residual of encoded numbers back to what it was. It keeps the gradient's memory alive
// until the step is over.
using Rollback = absl::AnyInvocable<absl::Status(When)>;

}  // namespace hvd_compress

#endif  // HVD_COMPRESS_TENSORFLOW_OPS_ROLLBACK_H_
