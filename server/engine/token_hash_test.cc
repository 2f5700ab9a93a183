#include "server/engine/token_hash.h"

#include <gtest/gtest.h>

#include <set>
#include <vector>

namespace gdn::engine {
namespace {

TEST(TokenHash, DoesNotDependOnTheSplit) {
  std::vector<int32_t> tokens;
  for (int32_t i = 0; i < 130; ++i) tokens.push_back(i * 37 % 101);
  const std::span<const int32_t> all(tokens);
  const uint64_t whole = HashTokens(kEmptyHash, all);
  for (size_t split = 0; split <= tokens.size(); ++split) {
    EXPECT_EQ(HashTokens(HashTokens(kEmptyHash, all.first(split)), all.subspan(split)), whole);
  }
  const std::vector<float> rows = {1, 2, 3, 4, 5, 6};
  EXPECT_EQ(HashHidden(HashHidden(kEmptyHash, std::span(rows).first(3), 3),
                       std::span(rows).subspan(3), 3),
            HashHidden(kEmptyHash, rows, 3));
}

TEST(TokenHash, TellsHistoriesApart) {
  std::set<uint64_t> seen = {kEmptyHash};
  const auto add = [&](uint64_t hash) { EXPECT_TRUE(seen.insert(hash).second); };
  add(HashTokens(kEmptyHash, std::vector<int32_t>{0}));
  add(HashTokens(kEmptyHash, std::vector<int32_t>{0, 0}));
  add(HashTokens(kEmptyHash, std::vector<int32_t>{0, 1}));
  add(HashTokens(kEmptyHash, std::vector<int32_t>{1, 0}));
  add(HashTokens(kEmptyHash, std::vector<int32_t>{1}));
  add(HashHidden(kEmptyHash, std::vector<float>{0, 0}, 1));
  add(HashHidden(kEmptyHash, std::vector<float>{0, 0}, 2));
  add(HashHidden(kEmptyHash, std::vector<float>{0}, 1));
  add(HashHidden(kEmptyHash, std::vector<float>{1, 2, 3, 4, 5}, 5));
  add(HashHidden(kEmptyHash, std::vector<float>{5, 2, 3, 4, 1}, 5));
  add(HashHidden(kEmptyHash, std::vector<float>{2, 1, 3, 4, 5}, 5));
  for (int32_t i = 2; i < 10'000; ++i) add(HashTokens(kEmptyHash, std::vector<int32_t>{i}));
}

}  // namespace
}  // namespace gdn::engine
