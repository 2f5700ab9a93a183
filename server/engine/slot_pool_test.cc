#include "server/engine/slot_pool.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <vector>

namespace gdn::engine {
namespace {

TEST(SlotPool, GivesEverySlotButTheFirstOnce) {
  for (const int64_t usable : {1, 2, 4}) {
    SlotPool pool(usable + 1);
    EXPECT_EQ(pool.num_usable(), usable);
    std::set<int64_t> seen;
    for (int64_t i = 0; i < usable; ++i) {
      const auto slot = pool.Acquire(SlotOwner::kLive);
      ASSERT_TRUE(slot.has_value());
      EXPECT_GT(slot->index, 0);
      EXPECT_LE(slot->index, usable);
      EXPECT_TRUE(seen.insert(slot->index).second);
    }
    EXPECT_FALSE(pool.Acquire(SlotOwner::kLive).has_value());
    EXPECT_EQ(pool.count(SlotOwner::kFree), 0);
    EXPECT_EQ(pool.count(SlotOwner::kLive), usable);
    EXPECT_EQ(pool.count(SlotOwner::kWarmUp), 1);
    EXPECT_TRUE(pool.CheckInvariants().ok());
  }
}

TEST(SlotPool, RefusesASecondRelease) {
  SlotPool pool(3);
  const SlotHandle slot = *pool.Acquire(SlotOwner::kLive);
  EXPECT_TRUE(pool.Release(slot, SlotOwner::kLive).ok());
  EXPECT_FALSE(pool.Release(slot, SlotOwner::kLive).ok());
  EXPECT_EQ(pool.count(SlotOwner::kFree), 2);
  // Nor after somebody else has got the same slot.
  const SlotHandle again = *pool.Acquire(SlotOwner::kLive);
  ASSERT_EQ(again.index, slot.index);
  EXPECT_NE(again.generation, slot.generation);
  EXPECT_FALSE(pool.Release(slot, SlotOwner::kLive).ok());
  EXPECT_FALSE(pool.Transfer(slot, SlotOwner::kLive, SlotOwner::kInFlight).ok());
  EXPECT_EQ(pool.count(SlotOwner::kLive), 1);
  EXPECT_TRUE(pool.CheckInvariants().ok());
}

TEST(SlotPool, RefusesStrangersAndNonsense) {
  SlotPool pool(3);
  const SlotHandle slot = *pool.Acquire(SlotOwner::kLive);
  EXPECT_FALSE(pool.Release(slot, SlotOwner::kInFlight).ok());
  EXPECT_FALSE(pool.Release({-1, 0}, SlotOwner::kLive).ok());
  EXPECT_FALSE(pool.Release({3, 0}, SlotOwner::kLive).ok());
  EXPECT_FALSE(pool.Release({0, 0}, SlotOwner::kWarmUp).ok());
  EXPECT_FALSE(pool.Release({2, 0}, SlotOwner::kFree).ok());
  EXPECT_FALSE(pool.Transfer({0, 0}, SlotOwner::kWarmUp, SlotOwner::kLive).ok());
  EXPECT_FALSE(pool.Transfer(slot, SlotOwner::kLive, SlotOwner::kFree).ok());
  EXPECT_TRUE(pool.Transfer(slot, SlotOwner::kLive, SlotOwner::kInFlight).ok());
  EXPECT_FALSE(pool.Release(slot, SlotOwner::kLive).ok());
  EXPECT_TRUE(pool.Release(slot, SlotOwner::kInFlight).ok());
  EXPECT_EQ(pool.count(SlotOwner::kFree), 2);
  EXPECT_TRUE(pool.CheckInvariants().ok());
}

TEST(SlotPool, AcquiresManyOrNone) {
  SlotPool pool(4);
  std::vector<SlotHandle> slots;
  EXPECT_FALSE(pool.AcquireMany(SlotOwner::kLive, 4, &slots));
  EXPECT_TRUE(slots.empty());
  EXPECT_EQ(pool.count(SlotOwner::kFree), 3);
  EXPECT_TRUE(pool.AcquireMany(SlotOwner::kLive, 3, &slots));
  EXPECT_EQ(slots.size(), 3u);
  EXPECT_EQ(pool.count(SlotOwner::kFree), 0);
}

TEST(SlotPool, KeepsItsInvariantsUnderRandomUse) {
  std::mt19937 rng(1);
  SlotPool pool(9);
  struct Held {
    SlotHandle slot;
    SlotOwner owner;
  };
  std::vector<Held> held;
  std::vector<SlotHandle> stale;
  for (int i = 0; i < 20'000; ++i) {
    const size_t pick = held.empty() ? 0 : rng() % held.size();
    switch (rng() % 4) {
      case 0:
        if (const auto slot = pool.Acquire(SlotOwner::kLive)) {
          held.push_back({*slot, SlotOwner::kLive});
        } else {
          ASSERT_EQ(held.size(), 8u);
        }
        break;
      case 1:
        if (held.empty()) break;
        ASSERT_TRUE(pool.Release(held[pick].slot, held[pick].owner).ok());
        stale.push_back(held[pick].slot);
        held.erase(held.begin() + static_cast<std::ptrdiff_t>(pick));
        break;
      case 2: {
        if (held.empty()) break;
        const SlotOwner to =
            held[pick].owner == SlotOwner::kLive ? SlotOwner::kInFlight : SlotOwner::kLive;
        ASSERT_TRUE(pool.Transfer(held[pick].slot, held[pick].owner, to).ok());
        held[pick].owner = to;
        break;
      }
      default:
        if (stale.empty()) break;
        ASSERT_FALSE(pool.Release(stale[rng() % stale.size()], SlotOwner::kLive).ok());
    }
    ASSERT_EQ(pool.count(SlotOwner::kFree) + static_cast<int64_t>(held.size()), 8);
  }
  EXPECT_TRUE(pool.CheckInvariants().ok());
}

}  // namespace
}  // namespace gdn::engine
