// Argument checks of the dense ops, beyond those every op shares.
#ifndef KERNELS_CAPI_DENSE_CHECKS_H_
#define KERNELS_CAPI_DENSE_CHECKS_H_

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "gdn/kernels/types.h"
#include "kernels/common/check.h"
#include "kernels/common/validate.h"

namespace gdn::kernels {

inline constexpr size_t kWorkspaceAlignment = 64;

inline gdn_status CheckPointer(const char* op, const char* name, const void* pointer) {
  GDN_CHECK_ARG(pointer != nullptr, GDN_INVALID_ARGUMENT, "%s: %s must not be NULL", op, name);
  return GDN_OK;
}

inline gdn_status CheckEps(const char* op, float eps) {
  GDN_CHECK_ARG(std::isfinite(eps) && eps >= 0.0f, GDN_INVALID_ARGUMENT,
                "%s: eps must be finite and >= 0, got %g", op, static_cast<double>(eps));
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
