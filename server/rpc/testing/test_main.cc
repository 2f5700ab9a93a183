#include <grpc/grpc.h>
#include <gtest/gtest.h>

#include "absl/synchronization/mutex.h"

int main(int argc, char** argv) {
  // The distribution's Abseil is built without NDEBUG: its lock-order check is slow, and fatal.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  testing::InitGoogleTest(&argc, argv);
  // Between two tests gRPC would otherwise shut down in a thread of its own, which the next test's
  // start can catch half-way and then wait ten seconds for.
  grpc_init();
  const int result = RUN_ALL_TESTS();
  grpc_shutdown();
  return result;
}
