// Owned memory for weights that are not views of a file.
#ifndef SERVER_MODEL_STORAGE_H_
#define SERVER_MODEL_STORAGE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/statusor.h"

namespace gdn::model {

struct Storage {
  std::shared_ptr<const void> owner;
  std::span<std::byte> bytes;  // Aligned to 64 bytes, uninitialised.
};

// RESOURCE_EXHAUSTED rather than an exception if there is not that much memory.
absl::StatusOr<Storage> AllocateStorage(uint64_t size);

}  // namespace gdn::model

#endif  // SERVER_MODEL_STORAGE_H_
