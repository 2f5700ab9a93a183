// File: token_hash.h
//
// The rolling hash of a session's inputs: equal histories give equal hashes, however the inputs
// were split into calls. Not cryptographic.
#ifndef SERVER_ENGINE_TOKEN_HASH_H_
#define SERVER_ENGINE_TOKEN_HASH_H_

#include <cstdint>
#include <span>

namespace gdn::engine {

// Of a session that has consumed nothing.
inline constexpr uint64_t kEmptyHash = 0;

uint64_t HashTokens(uint64_t hash, std::span<const int32_t> tokens);
// Over the bits of the rows; `rows` holds whole rows of `hidden_size`.
uint64_t HashHidden(uint64_t hash, std::span<const float> rows, int64_t hidden_size);

}  // namespace gdn::engine

#endif  // SERVER_ENGINE_TOKEN_HASH_H_
