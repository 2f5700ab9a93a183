#include <cstdarg>
#include <cstdio>

#include "kernels/common/check.h"

namespace {

// One fixed buffer per thread: an error path must not allocate.
thread_local char last_error[512] = "";

}  // namespace

namespace gdn::kernels {

gdn_status Fail(gdn_status status, const char* format, ...) {
  va_list args;
  va_start(args, format);
  std::vsnprintf(last_error, sizeof(last_error), format, args);
  va_end(args);
  return status;
}

}  // namespace gdn::kernels

const char* gdn_last_error(void) { return last_error; }

const char* gdn_status_string(gdn_status status) {
  switch (status) {
    case GDN_OK:
      return "GDN_OK";
    case GDN_INVALID_ARGUMENT:
      return "GDN_INVALID_ARGUMENT";
    case GDN_UNSUPPORTED_SHAPE:
      return "GDN_UNSUPPORTED_SHAPE";
    case GDN_UNSUPPORTED_TYPE:
      return "GDN_UNSUPPORTED_TYPE";
    case GDN_WORKSPACE_TOO_SMALL:
      return "GDN_WORKSPACE_TOO_SMALL";
    case GDN_BACKEND_UNAVAILABLE:
      return "GDN_BACKEND_UNAVAILABLE";
    case GDN_DEVICE_ERROR:
      return "GDN_DEVICE_ERROR";
  }
  return "GDN_UNKNOWN_STATUS";
}
