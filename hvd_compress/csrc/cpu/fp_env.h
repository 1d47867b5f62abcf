// The floating-point environment that payload bytes depend on.
#ifndef HVDC_CPU_FP_ENV_H_
#define HVDC_CPU_FP_ENV_H_

#if defined(__x86_64__)
#include <xmmintrin.h>
#else
#include <fenv.h>
#endif

namespace hvdc {

// Round to nearest, subnormals kept, no traps, until the end of the scope. Frameworks set other
// modes on their threads (TensorFlow flushes subnormals to zero), and the bytes must not depend on
// the thread that encodes.
class DefaultFpEnv {
 public:
#if defined(__x86_64__)
  DefaultFpEnv() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
  ~DefaultFpEnv() { _mm_setcsr(saved_); }
#else
  DefaultFpEnv() {
    fegetenv(&saved_);
    fesetenv(FE_DFL_ENV);
  }
  ~DefaultFpEnv() { fesetenv(&saved_); }
#endif
  DefaultFpEnv(const DefaultFpEnv&) = delete;
  DefaultFpEnv& operator=(const DefaultFpEnv&) = delete;

 private:
#if defined(__x86_64__)
  unsigned saved_;
#else
  fenv_t saved_;
#endif
};

}  // namespace hvdc

#endif  // HVDC_CPU_FP_ENV_H_
