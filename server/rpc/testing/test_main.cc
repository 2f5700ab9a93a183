#include <gtest/gtest.h>

#include "absl/synchronization/mutex.h"

int main(int argc, char** argv) {
  // The distribution's Abseil is built without NDEBUG: its lock-order check is slow, and fatal.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
