#include "server/engine/session_table.h"

#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <string>

namespace gdn::engine {
namespace {

Session* Add(SessionTable* table, int64_t ttl_ms, int64_t now_ns = 0) {
  auto session = std::make_unique<Session>();
  session->ttl_ms = ttl_ms;
  return table->Add(std::move(session), now_ns);
}

TEST(SessionTable, DrawsLongDistinctIds) {
  SessionTable table;
  std::set<std::string> ids;
  for (int i = 0; i < 1000; ++i) {
    const std::string id = Add(&table, 0)->id;
    EXPECT_EQ(id.size(), 32u);
    EXPECT_EQ(id.find_first_not_of("0123456789abcdef"), std::string::npos);
    EXPECT_TRUE(ids.insert(id).second);
  }
  // Every digit of a random id takes many values.
  for (size_t digit = 0; digit < 32; ++digit) {
    std::set<char> seen;
    for (const std::string& id : ids) seen.insert(id[digit]);
    EXPECT_EQ(seen.size(), 16u) << "digit " << digit;
  }
  EXPECT_EQ(table.size(), 1000);
}

TEST(SessionTable, WalksInOrderOfId) {
  SessionTable table;
  std::set<std::string> ids;
  for (int i = 0; i < 50; ++i) ids.insert(Add(&table, 0)->id);
  auto expected = ids.begin();
  for (const Session* s = table.After(""); s != nullptr; s = table.After(s->id)) {
    ASSERT_NE(expected, ids.end());
    EXPECT_EQ(s->id, *expected++);
  }
  EXPECT_EQ(expected, ids.end());
}

TEST(SessionTable, ExpiresTheIdleInOrderAndNeverTheUsed) {
  SessionTable table;
  Session* never = Add(&table, 0);
  Session* late = Add(&table, 20);
  Session* soon = Add(&table, 10);
  EXPECT_EQ(table.next_expiry_ns(), 10'000'000);
  EXPECT_EQ(table.Expired(9'999'999), nullptr);
  EXPECT_EQ(table.Expired(10'000'000), soon);
  table.BeginUse(soon);
  EXPECT_EQ(table.Expired(15'000'000), nullptr);
  EXPECT_EQ(table.Expired(20'000'000), late);
  table.Remove(late);
  EXPECT_EQ(table.next_expiry_ns(), kNever);
  table.EndUse(soon, 30'000'000, 5);
  EXPECT_EQ(soon->last_use_time_ms, 5);
  EXPECT_EQ(table.next_expiry_ns(), 40'000'000);
  EXPECT_TRUE(table.CheckInvariants());
  table.Remove(soon);
  EXPECT_EQ(table.Expired(kNever), nullptr);
  EXPECT_EQ(table.Find(never->id), never);
  EXPECT_EQ(table.size(), 1);
}

TEST(SessionTable, TakesTheLargestTtl) {
  SessionTable table;
  Session* session = Add(&table, kNever, 1'000);
  EXPECT_EQ(table.next_expiry_ns(), kNever);
  EXPECT_EQ(table.Expired(kNever), nullptr);
  EXPECT_TRUE(table.CheckInvariants());
  table.Remove(session);
}

}  // namespace
}  // namespace gdn::engine
