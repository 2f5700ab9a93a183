// The choice of a back end for ops that not every back end has: a missing one is refused by name.
#ifndef KERNELS_CAPI_PARTIAL_DISPATCH_H_
#define KERNELS_CAPI_PARTIAL_DISPATCH_H_

#include <cstring>

#include "gdn/kernels/types.h"
#include "kernels/common/check.h"
#include "kernels/common/validate.h"

namespace gdn::kernels {

enum class HasBackends { kRef, kRefAndCpu };

inline gdn_status CheckPartialExec(const char* op, const gdn_exec* exec, const void* args,
                                   HasBackends has) {
  if (exec == nullptr || args == nullptr) return CheckExec(op, exec, args);
  // A C caller may store any integer; C++ may not load it as the enum.
  int backend = 0;
  static_assert(sizeof(backend) == sizeof(exec->backend));
  std::memcpy(&backend, &exec->backend, sizeof(backend));
  const bool held =
      backend == GDN_BACKEND_REF || (backend == GDN_BACKEND_CPU && has == HasBackends::kRefAndCpu);
  GDN_CHECK_ARG(held, GDN_BACKEND_UNAVAILABLE,
                "%s: this op runs on the back end%s so far, got exec.backend %d", op,
                has == HasBackends::kRefAndCpu ? "s REF (0) and CPU (1)" : " REF (0) only",
                backend);
  return GDN_OK;
}

}  // namespace gdn::kernels

#endif  // KERNELS_CAPI_PARTIAL_DISPATCH_H_
