#include "gdn/kernels/cpu_pool.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/recurrence_test_util.h"

namespace gdn::kernels {
namespace {

TEST(CpuPool, EveryIndexRunsOnceForEveryCountGrainAndThreads) {
  for (int32_t threads : {1, 2, 3, 7}) {
    for (int32_t spin_us : {0, 50}) {
      const Pool pool(gdn_cpu_pool_create(threads, spin_us));
      ASSERT_NE(pool, nullptr) << gdn_last_error();
      EXPECT_EQ(gdn_cpu_pool_threads(pool.get()), threads);
      for (int64_t count : {0, 1, 2, 3, 6, 7, 8, 100, 1001}) {
        for (int64_t grain : {0, 1, 4, 50, 5000}) {
          std::vector<std::atomic<int>> runs(static_cast<size_t>(count));
          std::mutex mutex;
          std::set<int32_t> workers;
          cpu::ParallelFor(
              pool.get(), count, grain, [&](int64_t begin, int64_t end, int32_t worker) {
                for (int64_t i = begin; i < end; ++i) runs[i].fetch_add(1);
                const std::lock_guard<std::mutex> lock(mutex);
                EXPECT_TRUE(workers.insert(worker).second) << "worker " << worker << " ran twice";
              });
          for (const auto& run : runs) ASSERT_EQ(run.load(), 1);
          if (count == 0) {
            EXPECT_TRUE(workers.empty());
          } else {
            const int64_t parts = std::min<int64_t>(
                threads, std::max<int64_t>(1, count / std::max<int64_t>(1, grain)));
            EXPECT_EQ(static_cast<int64_t>(workers.size()), parts);
            EXPECT_EQ(*workers.rbegin(), parts - 1);
          }
        }
      }
    }
  }
}

TEST(CpuPool, ThePartitionIsStatic) {
  const Pool pool(gdn_cpu_pool_create(4, 50));
  std::vector<int32_t> first(1000, -1);
  for (int repeat = 0; repeat < 50; ++repeat) {
    std::vector<int32_t> owner(1000, -1);
    cpu::ParallelFor(pool.get(), 1000, 1, [&](int64_t begin, int64_t end, int32_t worker) {
      for (int64_t i = begin; i < end; ++i) owner[i] = worker;
    });
    if (repeat == 0) first = owner;
    EXPECT_EQ(owner, first);
  }
}

// Writes of one region are seen by the next, whoever runs it; sleeping workers wake up.
TEST(CpuPool, RegionsFollowEachOther) {
  for (int32_t spin_us : {0, 20}) {
    const Pool pool(gdn_cpu_pool_create(3, spin_us));
    std::vector<int64_t> data(300, 0);
    std::vector<int64_t> mirror(300, 0);
    for (int64_t round = 0; round < 2000; ++round) {
      cpu::ParallelFor(pool.get(), 300, 1, [&](int64_t begin, int64_t end, int32_t) {
        for (int64_t i = begin; i < end; ++i) mirror[i] = data[299 - i] + 1;
      });
      cpu::ParallelFor(pool.get(), 300, 1, [&](int64_t begin, int64_t end, int32_t) {
        for (int64_t i = begin; i < end; ++i) data[i] = mirror[299 - i];
      });
    }
    for (int64_t value : data) ASSERT_EQ(value, 2000);
  }
}

TEST(CpuPool, WithoutAPoolTheCallerRunsEverything) {
  EXPECT_EQ(gdn_cpu_pool_threads(nullptr), 1);
  int calls = 0;
  cpu::ParallelFor(nullptr, 10, 1, [&](int64_t begin, int64_t end, int32_t worker) {
    ++calls;
    EXPECT_EQ(begin, 0);
    EXPECT_EQ(end, 10);
    EXPECT_EQ(worker, 0);
  });
  EXPECT_EQ(calls, 1);
  gdn_cpu_pool_destroy(nullptr);
}

TEST(CpuPool, RefusesImpossibleSizes) {
  EXPECT_EQ(gdn_cpu_pool_create(0, 0), nullptr);
  EXPECT_NE(std::string(gdn_last_error()).find("num_threads"), std::string::npos);
  EXPECT_EQ(gdn_cpu_pool_create(-1, 0), nullptr);
  EXPECT_EQ(gdn_cpu_pool_create(2, -1), nullptr);
  EXPECT_EQ(gdn_cpu_pool_create(1 << 30, 0), nullptr);
}

TEST(Status, NamesEveryStatus) {
  for (int i = 0; i <= 6; ++i) {
    const std::string name = gdn_status_string(static_cast<gdn_status>(i));
    EXPECT_EQ(name.rfind("GDN_", 0), 0u) << name;
    EXPECT_NE(name, "GDN_UNKNOWN_STATUS");
  }
  EXPECT_STREQ(gdn_status_string(static_cast<gdn_status>(7)), "GDN_UNKNOWN_STATUS");
}

TEST(Status, TheLastErrorBelongsToItsThread) {
  EXPECT_EQ(gdn_cpu_pool_create(0, 0), nullptr);
  const std::string here = gdn_last_error();
  EXPECT_FALSE(here.empty());
  std::string there = "unset";
  std::thread([&] { there = gdn_last_error(); }).join();
  EXPECT_EQ(there, "");
  EXPECT_EQ(here, gdn_last_error());
}

}  // namespace
}  // namespace gdn::kernels
