#include "server/pipeline/kernel_status.h"

#include "absl/strings/str_cat.h"

namespace gdn::pipeline {

absl::Status KernelStatus(gdn_status status, const char* op) {
  if (status == GDN_OK) return absl::OkStatus();
  const std::string message =
      absl::StrCat(op, ": ", gdn_status_string(status), ": ", gdn_last_error());
  switch (status) {
    case GDN_UNSUPPORTED_SHAPE:
    case GDN_UNSUPPORTED_TYPE:
    case GDN_BACKEND_UNAVAILABLE:
      return absl::UnimplementedError(message);
    default:
      return absl::InternalError(message);
  }
}

}  // namespace gdn::pipeline
