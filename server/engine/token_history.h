// The distinct token ids of a call, in order of first appearance, for the repetition penalty.
#ifndef SERVER_ENGINE_TOKEN_HISTORY_H_
#define SERVER_ENGINE_TOKEN_HISTORY_H_

#include <cstdint>
#include <span>
#include <vector>

namespace gdn::engine {

class TokenHistory {
 public:
  // Until Enable it records nothing and owns no memory.
  void Enable(int64_t vocab_size) { seen_.assign(static_cast<size_t>((vocab_size + 63) / 64), 0); }
  // `token` is in [0, vocab_size).
  void Add(int32_t token) {
    if (seen_.empty()) return;
    uint64_t& word = seen_[static_cast<size_t>(token) / 64];
    const uint64_t bit = uint64_t{1} << (static_cast<uint32_t>(token) % 64);
    if ((word & bit) != 0) return;
    word |= bit;
    distinct_.push_back(token);
  }
  std::span<const int32_t> distinct() const { return distinct_; }

 private:
  std::vector<uint64_t> seen_;  // One bit per id.
  std::vector<int32_t> distinct_;
};

}  // namespace gdn::engine

#endif  // SERVER_ENGINE_TOKEN_HISTORY_H_
