// Argument checks of the dense ops, beyond those every op shares.
#ifndef KERNELS_CAPI_DENSE_CHECKS_H_
#define KERNELS_CAPI_DENSE_CHECKS_H_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "gdn/kernels/types.h"
#include "kernels/common/check.h"
#include "kernels/common/convert.h"
#include "kernels/common/validate.h"

namespace gdn::kernels {

inline constexpr size_t kWorkspaceAlignment = 64;

// A C caller may store any integer in an enumeration; C++ may not load it as one.
template <typename Enum>
int EnumValue(const Enum& stored) {
  int value = 0;
  static_assert(sizeof(value) == sizeof(stored));
  std::memcpy(&value, &stored, sizeof(value));
  return value;
}

inline gdn_status CheckElementType(const char* op, const char* name, const gdn_dtype& stored) {
  const int dtype = EnumValue(stored);
  GDN_CHECK_ARG(dtype == GDN_F32 || dtype == GDN_BF16 || dtype == GDN_F16, GDN_INVALID_ARGUMENT,
                "%s: %s must be GDN_F32 (0), GDN_BF16 (1) or GDN_F16 (2), got %d", op, name, dtype);
  return GDN_OK;
}

inline gdn_status CheckPointer(const char* op, const char* name, const void* pointer) {
  GDN_CHECK_ARG(pointer != nullptr, GDN_INVALID_ARGUMENT, "%s: %s must not be NULL", op, name);
  return GDN_OK;
}

inline gdn_status CheckEps(const char* op, float eps) {
  GDN_CHECK_ARG(std::isfinite(eps) && eps >= 0.0f, GDN_INVALID_ARGUMENT,
                "%s: eps must be finite and >= 0, got %g", op, static_cast<double>(eps));
  return GDN_OK;
}

// What the copy engine and vector loads of a product on CUDA ask for.
template <typename Args>
gdn_status CheckCudaProduct(const char* op, const Args& args) {
  const auto aligned = [](const void* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
  };
  GDN_CHECK_ARG(aligned(args.x) && args.x_row_stride * SizeOf(args.x_dtype) % 16 == 0,
                GDN_INVALID_ARGUMENT,
                "%s: on CUDA the rows of x must be 16-byte aligned, got x %p and x_row_stride %lld",
                op, args.x, static_cast<long long>(args.x_row_stride));
  GDN_CHECK_ARG(aligned(args.weight), GDN_INVALID_ARGUMENT,
                "%s: on CUDA weight must be 16-byte aligned, got %p", op, args.weight);
  GDN_CHECK_ARG(aligned(args.norm_weight), GDN_INVALID_ARGUMENT,
                "%s: on CUDA norm_weight must be 16-byte aligned, got %p", op,
                static_cast<const void*>(args.norm_weight));
  return GDN_OK;
}

inline gdn_status CheckWorkspace(const char* op, const gdn_exec& exec, size_t needed) {
  if (needed == 0) return GDN_OK;
  const size_t given = exec.workspace == nullptr ? 0 : exec.workspace_bytes;
  GDN_CHECK_ARG(given >= needed, GDN_WORKSPACE_TOO_SMALL,
                "%s: exec.workspace must hold %zu bytes (see %s_workspace), got %zu", op, needed,
                op, given);
  GDN_CHECK_ARG(reinterpret_cast<uintptr_t>(exec.workspace) % kWorkspaceAlignment == 0,
                GDN_INVALID_ARGUMENT, "%s: exec.workspace must be %zu-byte aligned, got %p", op,
                kWorkspaceAlignment, exec.workspace);
  return GDN_OK;
}

}  // namespace gdn::kernels

#endif  // KERNELS_CAPI_DENSE_CHECKS_H_
