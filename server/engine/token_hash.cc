#include "server/engine/token_hash.h"

#include <bit>

namespace gdn::engine {
namespace {

// The finaliser of splitmix64, a bijection in which every input bit reaches every output bit.
uint64_t Mix(uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9u;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Kinds are apart: a token never looks like a row. Odd multiples keep Push(0, ...) off its fixed
// point.
constexpr uint64_t kTokenTag = 0x9e3779b97f4a7c15u;
constexpr uint64_t kRowTag = 0xd1b54a32d192ed03u;

uint64_t Push(uint64_t hash, uint64_t tag, uint64_t value) {
  return Mix(Mix(hash + tag) ^ (value * kTokenTag + tag));
}

}  // namespace

uint64_t HashTokens(uint64_t hash, std::span<const int32_t> tokens) {
  for (const int32_t token : tokens) {
    hash = Push(hash, kTokenTag, static_cast<uint32_t>(token));
  }
  return hash;
}

uint64_t HashHidden(uint64_t hash, std::span<const float> rows, int64_t hidden_size) {
  const size_t width = static_cast<size_t>(hidden_size);
  for (size_t begin = 0; begin + width <= rows.size(); begin += width) {
    // Four chains at once; one alone would wait for each multiplication.
    uint64_t lane[4] = {1, 2, 3, 4};
    for (size_t i = 0; i < width; ++i) {
      uint64_t& h = lane[i & 3];
      h = (h ^ std::bit_cast<uint32_t>(rows[begin + i])) * 0xff51afd7ed558ccdu;
      h ^= h >> 32;
    }
    for (const uint64_t h : lane) hash = Push(hash, kRowTag, h);
  }
  return hash;
}

}  // namespace gdn::engine
