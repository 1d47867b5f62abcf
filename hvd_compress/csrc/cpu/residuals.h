// Residuals in memory: float32, or bfloat16 that is rounded at random.
#ifndef HVDC_CPU_RESIDUALS_H_
#define HVDC_CPU_RESIDUALS_H_

#include <string.h>

#include "codec/cast.h"
#include "cpu/kernels.h"

namespace hvdc {
namespace HVDC_ARCH {

template <class V>
HVDC_HD typename V::F LoadResidual(const char* from, bool bfloat) {
  return bfloat ? FromBfloat<V>(V::LoadShorts(reinterpret_cast<const uint16_t*>(from)))
                : V::Load(reinterpret_cast<const float*>(from));
}

// The places of some elements' residuals, and of the next ones.
template <class V>
struct ResidualSink {
  using F = typename V::F;

  // Without a residual, there is nothing to add to.
  HVDC_HD ResidualSink From(int64_t i) const {
    return before ? ResidualSink{before + i * width, after + i * width, width, stream} : *this;
  }

  // Lanes of a tile that rounder has moved to; kWidth is width. Elements that decode to no finite
  // number keep theirs.
  template <int kWidth, bool kAlwaysFinite>
  HVDC_HD void Put(const Rounder<V>& rounder, int at, F kept, F decoded) const {
    F rest = V::Sub(kept, decoded);
    if constexpr (!kAlwaysFinite) {
      const typename V::M finite = IsFinite<V>(decoded);
      if (__builtin_expect(V::ToMaskBits(finite) != 0xFFFFu, 0)) {
        rest = V::Select(finite, rest, LoadResidual<V>(before + at * kWidth, kWidth == 2));
      }
    }
    if constexpr (kWidth == 2) {
      uint16_t* const to = reinterpret_cast<uint16_t*>(after) + at;
      const typename V::I rounded = rounder.Round(at / kLanes, rest);
      stream ? V::StreamShorts(to, rounded) : V::StoreShorts(to, rounded);
    } else {
      float* const to = reinterpret_cast<float*>(after) + at;
      stream ? V::Stream(to, rest) : V::Store(to, rest);
    }
  }

  const char* before;
  char* after;
  int width;  // bytes of a residual
  bool stream;
};

template <class V>
inline ResidualSink<V> SinkOf(const EncodeJob& job, int64_t start) {
  return {job.ResidualAt(start), job.NextResidualAt(start), job.residual_width, job.stream};
}

// The residuals of elements that are not sent stay, wherever they are to stand.
inline void KeepResiduals(const EncodeJob& job, int64_t start, int64_t count) {
  if (job.mode == Mode::kNone || job.next_residual == job.residual) return;
  memcpy(job.NextResidualAt(start), job.ResidualAt(start),
         static_cast<size_t>(count * job.residual_width));
}

// The next residuals of elements from start on, which begins a tile: kept less decoded, which may
// be null. Both are read to the end of a vector.
template <class V>
inline void StoreResiduals(const EncodeJob& job, Rounder<V>* rounder, int64_t start, int64_t count,
                           const float* kept, const float* decoded) {
  const ResidualSink<V> sink = SinkOf<V>(job, start);
  const auto put = [&](const ResidualSink<V>& to, int64_t i, int at) {
    const typename V::F sent = decoded ? V::Load(decoded + i) : V::Set(0.0f);
    const typename V::F from = V::Load(kept + i);
    if (to.width == 2) return to.template Put<2, true>(*rounder, at, from, sent);
    to.template Put<4, true>(*rounder, at, from, sent);
  };
  for (int64_t i = 0; i < count; i += kLanes) {
    const int at = static_cast<int>(i % kTile);
    if (at == 0) rounder->MoveTo(start + i);
    if (i + kLanes <= count) {
      put(sink.From(i - at), i, at);
      continue;
    }
    char rest[kTile * sizeof(float)];
    put({rest, rest, sink.width, false}, i, at);
    memcpy(sink.after + i * sink.width, rest + at * sink.width,
           static_cast<size_t>((count - i) * sink.width));
  }
}

}  // namespace HVDC_ARCH
}  // namespace hvdc

#endif  // HVDC_CPU_RESIDUALS_H_
