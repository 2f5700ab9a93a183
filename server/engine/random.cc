#include "server/engine/random.h"

#include <sys/random.h>

#include <cstdio>
#include <cstdlib>

namespace gdn::engine {
namespace {

void FillRandom(void* data, size_t bytes) {
  // Up to 256 bytes arrive whole. The only lasting failure is a kernel without the call (before
  // Linux 3.17); predictable session ids would be worse than not running.
  if (getentropy(data, bytes) != 0) {
    std::perror("getentropy");
    std::abort();
  }
}

}  // namespace

uint64_t RandomUint64() {
  uint64_t value = 0;
  FillRandom(&value, sizeof(value));
  return value;
}

std::string RandomId() {
  static constexpr char kHex[] = "0123456789abcdef";
  unsigned char bytes[16];
  FillRandom(bytes, sizeof(bytes));
  std::string id;
  id.reserve(2 * sizeof(bytes));
  for (const unsigned char byte : bytes) {
    id.push_back(kHex[byte >> 4]);
    id.push_back(kHex[byte & 15]);
  }
  return id;
}

}  // namespace gdn::engine
