#include "client/cpp/gdnctl/exit_code.h"

namespace gdn::gdnctl {

const char kExitCodeHelp[] =
    "Exit codes:\n"
    "  0    success\n"
    "  1    wrong usage, or a file that cannot be read or written\n"
    "  2    no server, server not ready or draining, or out of time\n"
    "  3    no such session, session elsewhere than expected or in use, missing layers\n"
    "  4    request refused as invalid or over a limit\n"
    "  5    no free session slot, or queue full\n"
    "  6    internal error or damaged state\n"
    "  130  interrupted\n";

ExitCode ToExitCode(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kOk:
      return ExitCode::kOk;
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDeadlineExceeded:
      return ExitCode::kUnavailable;
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kAborted:
    case absl::StatusCode::kAlreadyExists:
      return ExitCode::kPrecondition;
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kUnimplemented:
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kUnauthenticated:
      return ExitCode::kRefused;
    case absl::StatusCode::kResourceExhausted:
      return ExitCode::kExhausted;
    default:
      return ExitCode::kInternal;
  }
}

}  // namespace gdn::gdnctl
