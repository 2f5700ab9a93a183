// From the kernels' status enum to absl::Status.
#ifndef SERVER_PIPELINE_KERNEL_STATUS_H_
#define SERVER_PIPELINE_KERNEL_STATUS_H_

#include "absl/status/status.h"
#include "gdn/kernels/types.h"

namespace gdn::pipeline {

// OK, or an error that names the op and carries gdn_last_error(). Call it on the thread that ran
// it.
absl::Status KernelStatus(gdn_status status, const char* op);

}  // namespace gdn::pipeline

// Returns the status from the enclosing function unless it is OK.
#define GDN_RETURN_IF_ERROR(expr)                        \
  do {                                                   \
    absl::Status gdn_status_or_ok = (expr);              \
    if (!gdn_status_or_ok.ok()) return gdn_status_or_ok; \
  } while (false)

#endif  // SERVER_PIPELINE_KERNEL_STATUS_H_
