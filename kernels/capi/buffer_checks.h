// Argument checks of ops that write several buffers beside strided inputs: extents of views,
// alignment to the element, and no overlap between an output and anything else.
#ifndef KERNELS_CAPI_BUFFER_CHECKS_H_
#define KERNELS_CAPI_BUFFER_CHECKS_H_

#include <cstddef>
#include <cstdint>

#include "gdn/kernels/types.h"
#include "kernels/common/check.h"
#include "kernels/common/validate.h"

namespace gdn::kernels {

// A named range of memory; NULL where the argument is optional and absent.
struct Buffer {
  const char* name;
  const void* data;
  int64_t bytes;
};

inline gdn_status CheckAligned(const char* op, const char* name, const void* data, int64_t size) {
  GDN_CHECK_ARG(reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(size) == 0,
                GDN_INVALID_ARGUMENT, "%s: %s must be aligned to its element of %lld bytes, got %p",
                op, name, static_cast<long long>(size), data);
  return GDN_OK;
}

struct Axis {
  const char* name;
  int64_t extent;  // >= 1
  int64_t stride;
};

// Bytes from the first to the last element of a view. Strides >= 0; offsets must fit 64 bits.
template <size_t kAxes>
gdn_status ViewBytes(const char* op, const char* view, const Axis (&axes)[kAxes],
                     int64_t element_size, int64_t* bytes) {
  int64_t last = 0;
  for (const Axis& axis : axes) {
    if (axis.extent <= 1) continue;
    GDN_CHECK_ARG(axis.stride >= 0, GDN_INVALID_ARGUMENT, "%s: %s.%s must be >= 0, got %lld", op,
                  view, axis.name, static_cast<long long>(axis.stride));
    int64_t reach = 0;
    GDN_CHECK_ARG(!__builtin_mul_overflow(axis.extent - 1, axis.stride, &reach) &&
                      !__builtin_add_overflow(last, reach, &last),
                  GDN_INVALID_ARGUMENT, "%s: %s.%s %lld takes offsets beyond 64 bits", op, view,
                  axis.name, static_cast<long long>(axis.stride));
  }
  GDN_CHECK_ARG(!__builtin_add_overflow(last, int64_t{1}, &last) &&
                    !__builtin_mul_overflow(last, element_size, bytes),
                GDN_INVALID_ARGUMENT, "%s: %s take offsets beyond 64 bits", op, view);
  return GDN_OK;
}

inline bool Overlap(const Buffer& a, const Buffer& b) {
  if (a.data == nullptr || b.data == nullptr || a.bytes == 0 || b.bytes == 0) return false;
  const auto first = reinterpret_cast<uintptr_t>(a.data);
  const auto second = reinterpret_cast<uintptr_t>(b.data);
  return first < second ? second - first < static_cast<uintptr_t>(a.bytes)
                        : first - second < static_cast<uintptr_t>(b.bytes);
}

// Every output against every input and every other output.
template <size_t kInputs, size_t kOutputs>
gdn_status CheckDisjoint(const char* op, const Buffer (&inputs)[kInputs],
                         const Buffer (&outputs)[kOutputs]) {
  for (size_t i = 0; i < kOutputs; ++i) {
    for (const Buffer& input : inputs) {
      GDN_CHECK_ARG(!Overlap(outputs[i], input), GDN_INVALID_ARGUMENT,
                    "%s: %s must not overlap %s, got %p (%lld bytes) and %p (%lld bytes)", op,
                    outputs[i].name, input.name, outputs[i].data,
                    static_cast<long long>(outputs[i].bytes), input.data,
                    static_cast<long long>(input.bytes));
    }
    for (size_t j = 0; j < i; ++j) {
      GDN_CHECK_ARG(!Overlap(outputs[i], outputs[j]), GDN_INVALID_ARGUMENT,
                    "%s: %s must not overlap %s, got %p (%lld bytes) and %p (%lld bytes)", op,
                    outputs[i].name, outputs[j].name, outputs[i].data,
                    static_cast<long long>(outputs[i].bytes), outputs[j].data,
                    static_cast<long long>(outputs[j].bytes));
    }
  }
  return GDN_OK;
}

}  // namespace gdn::kernels

#endif  // KERNELS_CAPI_BUFFER_CHECKS_H_
