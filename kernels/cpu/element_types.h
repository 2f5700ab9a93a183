// The element types as C++ types, so that inner loops are instantiated once per type.
#ifndef KERNELS_CPU_ELEMENT_TYPES_H_
#define KERNELS_CPU_ELEMENT_TYPES_H_

#include <cstdint>
#include <utility>

#include "gdn/kernels/types.h"
#include "kernels/common/convert.h"

namespace gdn::cpu {

struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

inline float ToFloat(float value) { return value; }
inline float ToFloat(Bf16 value) { return kernels::Bf16ToF32(value.bits); }
inline float ToFloat(F16 value) { return kernels::F16ToF32(value.bits); }

inline void FromFloat(float value, float* out) { *out = value; }
inline void FromFloat(float value, Bf16* out) { out->bits = kernels::F32ToBf16(value); }
inline void FromFloat(float value, F16* out) { out->bits = kernels::F32ToF16(value); }

// Calls `body` with a value-initialised element of the C++ type of `dtype`.
template <typename Body>
void WithElementType(gdn_dtype dtype, Body&& body) {
  switch (dtype) {
    case GDN_F32:
      body(float{});
      return;
    case GDN_BF16:
      body(Bf16{});
      return;
    case GDN_F16:
      body(F16{});
      return;
  }
}

}  // namespace gdn::cpu

#endif  // KERNELS_CPU_ELEMENT_TYPES_H_
