// The choice of a back end by exec.backend, for the ops that run on GPUs too.
#ifndef KERNELS_CAPI_DISPATCH_H_
#define KERNELS_CAPI_DISPATCH_H_

#include <cstring>
#include <new>

#include "gdn/kernels/types.h"
#include "kernels/common/check.h"
#include "kernels/common/validate.h"

namespace gdn::kernels {

// CheckExec for ops that CUDA has too, where this build holds it.
inline gdn_status CheckAnyExec(const char* op, const gdn_exec* exec, const void* args) {
  if (exec == nullptr || args == nullptr) return CheckExec(op, exec, args);
  // A C caller may store any integer; C++ may not load it as the enum.
  int backend = 0;
  static_assert(sizeof(backend) == sizeof(exec->backend));
  std::memcpy(&backend, &exec->backend, sizeof(backend));
  if (backend != GDN_BACKEND_CUDA) return CheckExec(op, exec, args);
#ifdef GDN_HAS_CUDA
  return GDN_OK;
#else
  return Fail(GDN_BACKEND_UNAVAILABLE, "%s: this build has no CUDA back end (GDN_CUDA=OFF)", op);
#endif
}

// CheckExec for ops that CUDA does not have yet: it is refused by name, never replaced.
inline gdn_status CheckHostExec(const char* op, const gdn_exec* exec, const void* args) {
  GDN_RETURN_IF_ERROR(CheckAnyExec(op, exec, args));
  GDN_CHECK_ARG(exec->backend != GDN_BACKEND_CUDA, GDN_BACKEND_UNAVAILABLE,
                "%s: the CUDA back end does not have this op yet; REF (0) and CPU (1) have it", op);
  return GDN_OK;
}

// Calls an op of REF that allocates: no exception leaves the library.
template <typename Args>
gdn_status CallRef(const char* op, gdn_status (*function)(const gdn_exec&, const Args&),
                   const gdn_exec& exec, const Args& args) {
  try {
    return function(exec, args);
  } catch (const std::bad_alloc&) {
    return Fail(GDN_DEVICE_ERROR, "%s: no host memory for what REF keeps", op);
  }
}

}  // namespace gdn::kernels

// Returns from the enclosing function with the result of gdn::<REF or CPU>::Function(*exec, *args);
// CheckHostExec has passed.
#define GDN_DISPATCH_HOST(exec, args, Function)                                          \
  do {                                                                                   \
    if ((exec)->backend == GDN_BACKEND_CPU) return gdn::cpu::Function(*(exec), *(args)); \
    return gdn::ref::Function(*(exec), *(args));                                         \
  } while (false)

// Returns from the enclosing function with the result of gdn::<back end>::Function(*exec, *args);
// CheckAnyExec has passed.
#ifdef GDN_HAS_CUDA
#define GDN_DISPATCH(exec, args, Function)                                                 \
  do {                                                                                     \
    if ((exec)->backend == GDN_BACKEND_CUDA) return gdn::cuda::Function(*(exec), *(args)); \
    if ((exec)->backend == GDN_BACKEND_CPU) return gdn::cpu::Function(*(exec), *(args));   \
    return gdn::ref::Function(*(exec), *(args));                                           \
  } while (false)
#else
#define GDN_DISPATCH(exec, args, Function)                                               \
  do {                                                                                   \
    if ((exec)->backend == GDN_BACKEND_CPU) return gdn::cpu::Function(*(exec), *(args)); \
    return gdn::ref::Function(*(exec), *(args));                                         \
  } while (false)
#endif

#endif  // KERNELS_CAPI_DISPATCH_H_
