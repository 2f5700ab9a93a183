// How much memory the process may use, and whether the states of all sessions fit into it.
#ifndef SERVER_MEMORY_H_
#define SERVER_MEMORY_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace gdn {

struct MemoryLimits {
  int64_t total_bytes = 0;      // Of the machine, or of the control group that allows least.
  int64_t available_bytes = 0;  // Of that, what is not in use and could be had without swapping.
};

// As Linux tells; where it does not, a limit is INT64_MAX. `root` is where /proc and /sys are.
MemoryLimits ReadMemoryLimits(const std::string& root = "");

// INVALID_ARGUMENT, with the arithmetic: the states can never fit. The text, if any, is a warning:
// pages are only taken as sessions use them, so it may do, but memory does not have room for all
// that --max-sessions promises.
absl::StatusOr<std::string> CheckStateMemory(int64_t max_sessions, int64_t bytes_per_session,
                                             const MemoryLimits& limits);

}  // namespace gdn

#endif  // SERVER_MEMORY_H_
