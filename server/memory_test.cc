#include "server/memory.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>

namespace gdn {
namespace {

constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

class MemoryLimitsTest : public testing::Test {
 protected:
  MemoryLimitsTest()
      : root_(std::filesystem::temp_directory_path() /
              ("gdn_memory_test_" + std::to_string(getpid()))) {}
  ~MemoryLimitsTest() override { std::filesystem::remove_all(root_); }

  void Write(const std::string& path, const std::string& text) {
    const std::filesystem::path full = root_ / path;
    std::filesystem::create_directories(full.parent_path());
    std::ofstream(full) << text;
  }
  void Expect(int64_t total, int64_t available) {
    const MemoryLimits limits = ReadMemoryLimits(root_);
    EXPECT_EQ(limits.total_bytes, total);
    EXPECT_EQ(limits.available_bytes, available);
  }

  std::filesystem::path root_;
};

TEST_F(MemoryLimitsTest, OfTheMachine) {
  Expect(kUnlimited, kUnlimited);
  Write("proc/meminfo", "MemTotal:  1000 kB\nMemFree: 1 kB\nMemAvailable:    600 kB\n");
  Expect(1'024'000, 614'400);
  Write("proc/self/cgroup", "0::/\n");
  Write("sys/fs/cgroup/memory.max", "max\n");
  Expect(1'024'000, 614'400);
}

TEST_F(MemoryLimitsTest, OfTheTightestGroupOnTheWayUp) {
  Write("proc/meminfo", "MemTotal: 1000 kB\nMemAvailable: 600 kB\n");
  Write("proc/self/cgroup", "1:name=systemd:/x\n0::/a/b\n");
  Write("sys/fs/cgroup/a/b/memory.max", "max\n");
  Write("sys/fs/cgroup/a/memory.max", "500000\n");
  Write("sys/fs/cgroup/a/memory.current", "300000\n");
  Write("sys/fs/cgroup/a/memory.stat", "anon 200000\ninactive_file 100000\n");
  Expect(500'000, 300'000);
  Write("sys/fs/cgroup/a/b/memory.max", "400000\n");
  Write("sys/fs/cgroup/a/b/memory.current", "399999\n");
  Expect(400'000, 1);
}

TEST_F(MemoryLimitsTest, OfAContainerThatSeesItsGroupAsTheRoot) {
  Write("proc/meminfo", "MemTotal: 1000 kB\nMemAvailable: 600 kB\n");
  Write("proc/self/cgroup", "0::/host/only\n");
  Write("sys/fs/cgroup/memory.max", "400000\n");
  Expect(400'000, 400'000);
}

TEST_F(MemoryLimitsTest, OfTheFirstVersionOfGroups) {
  Write("proc/meminfo", "MemTotal: 1000 kB\nMemAvailable: 600 kB\n");
  Write("proc/self/cgroup", "5:cpu,memory:/a\n0::/\n");
  Write("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "9223372036854771712\n");
  Expect(1'024'000, 614'400);
  Write("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "500000\n");
  Write("sys/fs/cgroup/memory/a/memory.usage_in_bytes", "450000\n");
  Write("sys/fs/cgroup/memory/a/memory.stat", "total_inactive_file 50000\n");
  Expect(500'000, 100'000);
}

TEST(MemoryTest, ThisMachineHasSome) {
  const MemoryLimits limits = ReadMemoryLimits();
  EXPECT_GT(limits.available_bytes, 0);
  EXPECT_LT(limits.total_bytes, kUnlimited);
}

TEST(MemoryTest, WhatFitsIsNotMentioned) {
  const auto text = CheckStateMemory(9, 100, {.total_bytes = 1000, .available_bytes = 1000});
  ASSERT_TRUE(text.ok()) << text.status();
  EXPECT_EQ(*text, "");
}

TEST(MemoryTest, WhatMayNotFitIsAWarning) {
  const auto text = CheckStateMemory(9, 100, {.total_bytes = 1000, .available_bytes = 999});
  ASSERT_TRUE(text.ok()) << text.status();
  for (const char* part : {"--max-sessions=9", "10 states", "100 bytes", "room for 8 sessions"}) {
    EXPECT_NE(text->find(part), std::string::npos) << part << ": " << *text;
  }
}

TEST(MemoryTest, WhatCannotFitIsAnError) {
  for (const int64_t bytes : {int64_t{101}, int64_t{1} << 62}) {
    const auto text = CheckStateMemory(9, bytes, {.total_bytes = 1000, .available_bytes = 999});
    EXPECT_EQ(text.status().code(), absl::StatusCode::kInvalidArgument) << bytes;
    EXPECT_NE(text.status().message().find("--max-sessions=9"), absl::string_view::npos)
        << text.status();
  }
}

}  // namespace
}  // namespace gdn
