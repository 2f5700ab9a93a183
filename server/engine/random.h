// Unpredictable numbers from the operating system.
#ifndef SERVER_ENGINE_RANDOM_H_
#define SERVER_ENGINE_RANDOM_H_

#include <cstdint>
#include <string>

namespace gdn::engine {

uint64_t RandomUint64();
// 128 bits as 32 lower-case hex digits: an id nobody can guess.
std::string RandomId();

}  // namespace gdn::engine

#endif  // SERVER_ENGINE_RANDOM_H_
