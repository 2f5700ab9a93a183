// Seeded mutations of byte strings, for replaying a fuzzing corpus without a fuzzing engine.
#ifndef TESTS_FUZZ_MUTATOR_H_
#define TESTS_FUZZ_MUTATOR_H_

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace gdn::fuzz {

inline constexpr size_t kMaxMutationSize = 1 << 16;

// What breaks parsers of sizes and counts.
inline constexpr const char* kHostileNumbers[] = {"0",
                                                  "1",
                                                  "-1",
                                                  "7",
                                                  "255",
                                                  "65536",
                                                  "2147483648",
                                                  "4294967295",
                                                  "9223372036854775807",
                                                  "9223372036854775808",
                                                  "18446744073709551615",
                                                  "18446744073709551616",
                                                  "1e3",
                                                  "1.5",
                                                  "-0",
                                                  "1e999",
                                                  "null",
                                                  "true",
                                                  "\"1\"",
                                                  "[]",
                                                  "{}"};

// [begin, end) of the runs of characters for which `matches` is true.
template <typename Matches>
std::vector<std::pair<size_t, size_t>> Runs(const std::string& text, Matches matches) {
  std::vector<std::pair<size_t, size_t>> runs;
  for (size_t i = 0; i < text.size();) {
    size_t end = i;
    while (end < text.size() && matches(static_cast<unsigned char>(text[end]))) ++end;
    if (end > i) runs.emplace_back(i, end);
    i = end + 1;
  }
  return runs;
}

inline bool IsDigit(unsigned char c) { return std::isdigit(c) != 0; }
inline bool IsWord(unsigned char c) { return std::isalnum(c) != 0 || c == '_'; }

class Mutator {
 public:
  // Mutation `index` of a run is a function of (corpus, seed, index) alone.
  Mutator(const std::vector<std::string>& corpus, uint64_t seed) : corpus_(corpus), seed_(seed) {}

  std::string Make(uint64_t index);

 private:
  size_t Below(size_t bound) { return bound == 0 ? 0 : static_cast<size_t>(random_() % bound); }

  void FlipBits(std::string* text);
  void Truncate(std::string* text);
  void Insert(std::string* text);
  void Erase(std::string* text);
  void Repeat(std::string* text);
  void Splice(std::string* text);
  void EditNumber(std::string* text);
  void SwapTokens(std::string* text);

  const std::vector<std::string>& corpus_;
  uint64_t seed_;
  std::mt19937_64 random_;
};

inline std::string Mutator::Make(uint64_t index) {
  std::seed_seq sequence = {static_cast<uint32_t>(seed_), static_cast<uint32_t>(seed_ >> 32),
                            static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32)};
  random_.seed(sequence);
  using Mutation = void (Mutator::*)(std::string*);
  static constexpr Mutation kMutations[] = {
      &Mutator::FlipBits,   &Mutator::Truncate,   &Mutator::Insert,
      &Mutator::Erase,      &Mutator::Repeat,     &Mutator::Splice,
      &Mutator::EditNumber, &Mutator::EditNumber, &Mutator::SwapTokens};
  std::string text = corpus_[Below(corpus_.size())];
  for (size_t n = 1 + Below(4); n > 0; --n) {
    (this->*kMutations[Below(std::size(kMutations))])(&text);
    if (text.size() > kMaxMutationSize) text.resize(kMaxMutationSize);
  }
  return text;
}

inline void Mutator::FlipBits(std::string* text) {
  if (text->empty()) return;
  for (size_t n = 1 + Below(8); n > 0; --n) {
    char& byte = (*text)[Below(text->size())];
    byte = static_cast<char>(static_cast<unsigned char>(byte) ^ (1u << Below(8)));
  }
}

inline void Mutator::Truncate(std::string* text) { text->resize(Below(text->size() + 1)); }

inline void Mutator::Insert(std::string* text) {
  std::string piece(1 + Below(16), '\0');
  const bool structural = Below(2) == 0;
  for (char& c : piece) c = structural ? "{}[]\",:0"[Below(8)] : static_cast<char>(Below(256));
  text->insert(Below(text->size() + 1), piece);
}

inline void Mutator::Erase(std::string* text) {
  const size_t begin = Below(text->size() + 1);
  text->erase(begin, 1 + Below(32));
}

inline void Mutator::Repeat(std::string* text) {
  const size_t begin = Below(text->size() + 1);
  const std::string piece = text->substr(begin, 1 + Below(64));
  std::string repeated;
  for (size_t n = 1 + Below(40); n > 0; --n) repeated += piece;
  text->insert(begin, repeated);
}

inline void Mutator::Splice(std::string* text) {
  const std::string& other = corpus_[Below(corpus_.size())];
  text->resize(Below(text->size() + 1));
  text->append(other, Below(other.size() + 1), std::string::npos);
}

inline void Mutator::EditNumber(std::string* text) {
  const auto numbers = Runs(*text, IsDigit);
  if (numbers.empty()) return;
  const auto [begin, end] = numbers[Below(numbers.size())];
  if (Below(3) > 0) {
    text->replace(begin, end - begin, kHostileNumbers[Below(std::size(kHostileNumbers))]);
    return;
  }
  for (size_t i = begin; i < end; ++i) (*text)[i] = static_cast<char>('0' + Below(10));
}

inline void Mutator::SwapTokens(std::string* text) {
  const auto words = Runs(*text, IsWord);
  if (words.size() < 2) return;
  const auto from = words[Below(words.size())];
  const auto to = words[Below(words.size())];
  const std::string word = text->substr(from.first, from.second - from.first);
  text->replace(to.first, to.second - to.first, word);
}

}  // namespace gdn::fuzz

#endif  // TESTS_FUZZ_MUTATOR_H_
