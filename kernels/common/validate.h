// Argument checks shared by all ops.
#ifndef KERNELS_COMMON_VALIDATE_H_
#define KERNELS_COMMON_VALIDATE_H_

#include <cstdint>
#include <cstring>

#include "gdn/kernels/types.h"
#include "kernels/common/check.h"
#include "kernels/common/convert.h"

// Returns from the enclosing function unless `expression` is GDN_OK.
#define GDN_RETURN_IF_ERROR(expression)                      \
  do {                                                       \
    const gdn_status gdn_status_value = (expression);        \
    if (gdn_status_value != GDN_OK) return gdn_status_value; \
  } while (false)

namespace gdn::kernels {

// The largest extent accepted: the products that ops form of extents then stay within int64.
inline constexpr int64_t kMaxExtent = int64_t{1} << 40;

inline gdn_status CheckExec(const char* op, const gdn_exec* exec, const void* args) {
  GDN_CHECK_ARG(exec != nullptr, GDN_INVALID_ARGUMENT, "%s: exec must not be NULL", op);
  GDN_CHECK_ARG(args != nullptr, GDN_INVALID_ARGUMENT, "%s: args must not be NULL", op);
  // A C caller may store any integer; C++ may not load it as the enum.
  int backend = 0;
  static_assert(sizeof(backend) == sizeof(exec->backend));
  std::memcpy(&backend, &exec->backend, sizeof(backend));
  GDN_CHECK_ARG(backend == GDN_BACKEND_REF || backend == GDN_BACKEND_CPU, GDN_BACKEND_UNAVAILABLE,
                "%s: this build has the back ends REF (0) and CPU (1), got exec.backend %d", op,
                backend);
  return GDN_OK;
}

inline gdn_status CheckDtype(const char* op, const char* name, gdn_dtype dtype) {
  GDN_CHECK_ARG(IsDtype(dtype), GDN_INVALID_ARGUMENT,
                "%s: %s must be GDN_F32 (0), GDN_BF16 (1) or GDN_F16 (2), got %d", op, name,
                static_cast<int>(dtype));
  return GDN_OK;
}

inline gdn_status CheckExtent(const char* op, const char* name, int64_t value, int64_t least) {
  GDN_CHECK_ARG(value >= least && value <= kMaxExtent, GDN_INVALID_ARGUMENT,
                "%s: %s must be in %lld..2^40, got %lld", op, name, static_cast<long long>(least),
                static_cast<long long>(value));
  return GDN_OK;
}

inline gdn_status CheckStride(const char* op, const char* name, int64_t stride, int64_t least) {
  GDN_CHECK_ARG(stride >= least, GDN_INVALID_ARGUMENT, "%s: %s must be >= %lld elements, got %lld",
                op, name, static_cast<long long>(least), static_cast<long long>(stride));
  return GDN_OK;
}

}  // namespace gdn::kernels

#endif  // KERNELS_COMMON_VALIDATE_H_
