#include "server/engine/scheduler.h"

#include <gtest/gtest.h>

#include <deque>
#include <map>
#include <random>
#include <set>
#include <vector>

namespace gdn::engine {
namespace {

class SchedulerTest : public ::testing::Test {
 protected:
  // Pointers stay valid.
  Work* NewWork(WorkClass work_class, std::vector<int64_t> lengths) {
    Work& work = works_.emplace_back();
    work.work_class = work_class;
    for (size_t i = 0; i < lengths.size(); ++i) {
      work.pending.push_back({static_cast<int64_t>(i), lengths[i]});
    }
    return &work;
  }
  std::vector<BatchItem> Next(Scheduler* scheduler) {
    std::vector<BatchItem> batch;
    scheduler->Next(&batch);
    return batch;
  }
  static int64_t PrefillTokens(const std::vector<BatchItem>& batch) {
    int64_t tokens = 0;
    for (const BatchItem& item : batch) {
      if (item.work_class == WorkClass::kPrefill) tokens += item.tokens;
    }
    return tokens;
  }

  std::deque<Work> works_;
};

TEST_F(SchedulerTest, OrdersDecodeThenStepThenPrefill) {
  Scheduler scheduler({8, 64, 64});
  Work* prefill = NewWork(WorkClass::kPrefill, {10});
  Work* step = NewWork(WorkClass::kStep, {2, 3});
  Work* decode = NewWork(WorkClass::kDecode, {1});
  scheduler.Add(prefill);
  scheduler.Add(step);
  scheduler.Add(decode);
  const auto batch = Next(&scheduler);
  ASSERT_EQ(batch.size(), 4u);
  EXPECT_EQ(batch[0].work, decode);
  EXPECT_EQ(batch[1].work, step);
  EXPECT_EQ(batch[1].tokens, 2);
  EXPECT_EQ(batch[2].work, step);
  EXPECT_EQ(batch[2].tokens, 3);
  EXPECT_EQ(batch[3].work, prefill);
  EXPECT_EQ(batch[3].tokens, 10);
  EXPECT_TRUE(scheduler.empty());
  EXPECT_FALSE(decode->queued);
}

TEST_F(SchedulerTest, CutsASequenceAtTheSamePlacesWhateverTheLoad) {
  std::mt19937 rng(3);
  for (int round = 0; round < 50; ++round) {
    Scheduler scheduler({6, 16, 40});
    Work* watched = NewWork(WorkClass::kPrefill, {100});
    scheduler.Add(watched);
    std::vector<int64_t> cuts;
    for (int step = 0; step < 1000 && !scheduler.empty(); ++step) {
      if (step < 30) {
        for (auto i = rng() % 3; i > 0; --i) {
          scheduler.Add(NewWork(WorkClass::kPrefill, {1 + static_cast<int64_t>(rng() % 50),
                                                      1 + static_cast<int64_t>(rng() % 50)}));
        }
        if (rng() % 2 == 0) scheduler.Add(NewWork(WorkClass::kDecode, {1}));
      }
      int watched_chunks = 0;
      const auto batch = Next(&scheduler);
      for (const BatchItem& item : batch) {
        if (item.work != watched) continue;
        cuts.push_back(item.tokens);
        ++watched_chunks;
      }
      EXPECT_LE(watched_chunks, 1);
      EXPECT_LE(PrefillTokens(batch), 40);
      EXPECT_LE(batch.size(), 6u);
    }
    EXPECT_EQ(cuts, (std::vector<int64_t>{16, 16, 16, 16, 16, 16, 4}));
  }
}

TEST_F(SchedulerTest, RunsARaggedCallTogether) {
  Scheduler scheduler({256, 256, 512});
  Work* call = NewWork(WorkClass::kPrefill, {1, 3, 64, 65, 500});
  scheduler.Add(call);
  const auto first = Next(&scheduler);
  EXPECT_EQ(first.size(), 5u);
  EXPECT_EQ(PrefillTokens(first), 1 + 3 + 64 + 65 + 256);
  const auto second = Next(&scheduler);
  ASSERT_EQ(second.size(), 1u);
  EXPECT_EQ(second[0].sequence, 4);
  EXPECT_EQ(second[0].tokens, 244);
  EXPECT_TRUE(scheduler.empty());
}

TEST_F(SchedulerTest, LetsAtLeastOneChunkThrough) {
  Scheduler scheduler({4, 64, 32});  // A chunk over the budget.
  scheduler.Add(NewWork(WorkClass::kPrefill, {130}));
  EXPECT_EQ(PrefillTokens(Next(&scheduler)), 64);
  EXPECT_EQ(PrefillTokens(Next(&scheduler)), 64);
  EXPECT_EQ(PrefillTokens(Next(&scheduler)), 2);
  EXPECT_TRUE(scheduler.empty());
}

TEST_F(SchedulerTest, StepTokensDoNotUseUpThePrefillBudget) {
  Scheduler scheduler({8, 16, 16});
  scheduler.Add(NewWork(WorkClass::kStep, {8, 8, 8}));
  scheduler.Add(NewWork(WorkClass::kPrefill, {16}));
  const auto batch = Next(&scheduler);
  EXPECT_EQ(batch.size(), 4u);
  EXPECT_EQ(PrefillTokens(batch), 16);
}

TEST_F(SchedulerTest, AShortPromptDoesNotWaitForALongOne) {
  Scheduler scheduler({16, 64, 64});
  Work* huge = NewWork(WorkClass::kPrefill, std::vector<int64_t>(16, 100'000));
  Work* small = NewWork(WorkClass::kPrefill, {10});
  scheduler.Add(huge);
  scheduler.Add(small);
  int steps = 0;
  for (bool served = false; !served && steps < 100; ++steps) {
    for (const BatchItem& item : Next(&scheduler)) served = served || item.work == small;
  }
  EXPECT_LE(steps, 2);
}

// Every queued work is served within a bounded number of steps, whatever the numbers of rows.
TEST_F(SchedulerTest, StarvesNobody) {
  for (const int64_t max_rows : {1, 2, 3, 4, 7}) {
    Scheduler scheduler({max_rows, 16, 24});
    constexpr int kPerClass = 6;
    std::map<Work*, int> last_served;
    std::set<Work*> decodes;
    for (int i = 0; i < kPerClass; ++i) {
      Work* decode = NewWork(WorkClass::kDecode, {1});
      decodes.insert(decode);
      Work* step = NewWork(WorkClass::kStep, {1'000'000});
      Work* prefill = NewWork(WorkClass::kPrefill, {1'000'000, 15 + i, 1'000'000});
      for (Work* work : {decode, step, prefill}) {
        last_served[work] = 0;
        scheduler.Add(work);
      }
    }
    for (int step = 1; step <= 2000; ++step) {
      const auto batch = Next(&scheduler);
      ASSERT_EQ(static_cast<int64_t>(batch.size()), max_rows);
      for (const BatchItem& item : batch) {
        ASSERT_GT(item.tokens, 0);
        last_served[item.work] = step;
      }
      for (Work* decode : decodes) {
        if (!decode->queued) {
          decode->pending.assign(1, {0, 1});
          scheduler.Add(decode);
        }
      }
      for (const auto& [work, last] : last_served) {
        ASSERT_LE(step - last, 3 * kPerClass + 3) << "rows " << max_rows;
      }
    }
  }
}

TEST_F(SchedulerTest, SequencesOfACallTakeTurns) {
  Scheduler scheduler({2, 16, 32});
  Work* call = NewWork(WorkClass::kPrefill, {64, 64, 64, 64});
  scheduler.Add(call);
  std::vector<int64_t> order;
  for (int i = 0; i < 4; ++i) {
    for (const BatchItem& item : Next(&scheduler)) order.push_back(item.sequence);
  }
  EXPECT_EQ(order, (std::vector<int64_t>{0, 1, 2, 3, 0, 1, 2, 3}));
}

TEST_F(SchedulerTest, ForgetsRemovedAndDroppedWork) {
  Scheduler scheduler({8, 16, 64});
  Work* a = NewWork(WorkClass::kPrefill, {20, 20});
  Work* b = NewWork(WorkClass::kPrefill, {20});
  scheduler.Add(a);
  scheduler.Add(b);
  scheduler.Add(b);  // Twice is once.
  scheduler.Remove(b);
  scheduler.Remove(b);
  scheduler.Drop(a, 0);
  const auto batch = Next(&scheduler);
  ASSERT_EQ(batch.size(), 1u);
  EXPECT_EQ(batch[0].work, a);
  EXPECT_EQ(batch[0].sequence, 1);
  scheduler.Drop(a, 1);
  EXPECT_TRUE(scheduler.empty());
  EXPECT_TRUE(Next(&scheduler).empty());
}

}  // namespace
}  // namespace gdn::engine
