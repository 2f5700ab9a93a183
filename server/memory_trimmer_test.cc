#include "server/memory_trimmer.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace gdn {
namespace {

constexpr int64_t kMiB = 1 << 20;

TEST(TrimPolicyTest, TrimsOnceAfterABurst) {
  TrimPolicy policy;
  EXPECT_TRUE(policy.ShouldTrim({100 * kMiB, 40 * kMiB}, true, 0));
  policy.Trimmed({60 * kMiB, 40 * kMiB}, 0);
  // The free bytes are the same, and nothing is left to give back.
  EXPECT_FALSE(policy.ShouldTrim({61 * kMiB, 40 * kMiB}, true, 5'000));
  EXPECT_TRUE(policy.ShouldTrim({95 * kMiB, 40 * kMiB}, true, 10'000));
}

TEST(TrimPolicyTest, MemoryInUseIsNoReason) {
  TrimPolicy policy;
  EXPECT_FALSE(policy.ShouldTrim({1000 * kMiB, 1 * kMiB}, true, 0));
}

TEST(TrimPolicyTest, GrowthIsCountedFromTheLeastThatWasResident) {
  TrimPolicy policy;
  policy.Trimmed({500 * kMiB, 0}, 0);
  EXPECT_FALSE(policy.ShouldTrim({100 * kMiB, 0}, true, 1));  // An unmapped buffer.
  EXPECT_TRUE(policy.ShouldTrim({140 * kMiB, 40 * kMiB}, true, 2));
}

TEST(TrimPolicyTest, ABusyServerTrimsNowAndThen) {
  TrimPolicy policy;
  policy.Trimmed({60 * kMiB, 0}, 1'000);
  const HeapUse grown = {200 * kMiB, 100 * kMiB};
  EXPECT_FALSE(policy.ShouldTrim(grown, false, 1'000 + TrimPolicy::kBusyIntervalMs - 1));
  EXPECT_TRUE(policy.ShouldTrim(grown, false, 1'000 + TrimPolicy::kBusyIntervalMs));
}

TEST(MemoryTrimmerTest, StopsAtOnceAndSeesTheProcess) {
  const MemoryTrimmer trimmer([] { return true; });
  EXPECT_GT(ReadHeapUse().resident_bytes, kMiB);
}

}  // namespace
}  // namespace gdn
