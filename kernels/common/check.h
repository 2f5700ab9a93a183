// Argument checks of the C ABI: a failed check stores a sentence and returns a status.
#ifndef KERNELS_COMMON_CHECK_H_
#define KERNELS_COMMON_CHECK_H_

#include "gdn/kernels/types.h"

namespace gdn::kernels {

// Stores a printf-formatted message for gdn_last_error() and returns `status`.
[[gnu::format(printf, 2, 3)]] gdn_status Fail(gdn_status status, const char* format, ...);

}  // namespace gdn::kernels

// Returns `status` from the enclosing function, with the message, unless `condition` holds.
#define GDN_CHECK_ARG(condition, status, ...)                             \
  do {                                                                    \
    if (!(condition)) return ::gdn::kernels::Fail((status), __VA_ARGS__); \
  } while (false)

#endif  // KERNELS_COMMON_CHECK_H_
