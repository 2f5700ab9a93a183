#include <grpc/grpc.h>
#include <gtest/gtest.h>

#include "absl/synchronization/mutex.h"

int main(int argc, char** argv) {
  // The distribution's Abseil is built without NDEBUG: its lock-order check is slow, and fatal.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  testing::InitGoogleTest(&argc, argv);
  // Held for ever: gRPC's shutdown, between two tests or at the end, waits ten seconds for the
  // poller of a write that was cut short, if there is one.
  grpc_init();
  return RUN_ALL_TESTS();
}
