// What gdnctl's exit code says about the outcome.
#ifndef CLIENT_CPP_GDNCTL_EXIT_CODE_H_
#define CLIENT_CPP_GDNCTL_EXIT_CODE_H_

#include "absl/status/status.h"

namespace gdn::gdnctl {

enum class ExitCode : int {
  kOk = 0,
  kUsage = 1,
  kUnavailable = 2,
  kPrecondition = 3,
  kRefused = 4,
  kExhausted = 5,
  kInternal = 6,
  kInterrupted = 130,
};

ExitCode ToExitCode(absl::StatusCode code);

// The table of exit codes for --help.
extern const char kExitCodeHelp[];

}  // namespace gdn::gdnctl

#endif  // CLIENT_CPP_GDNCTL_EXIT_CODE_H_
