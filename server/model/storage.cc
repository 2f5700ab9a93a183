#include "server/model/storage.h"

#include <unistd.h>

#include <cstdlib>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace gdn::model {

absl::StatusOr<Storage> AllocateStorage(uint64_t size) {
  constexpr uint64_t kAlignment = 64;
  // Allocation itself succeeds far beyond what can be touched, so ask the machine first.
  const uint64_t machine_bytes =
      static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  void* data = nullptr;
  if (size <= machine_bytes) {
    const uint64_t rounded = (size + kAlignment - 1) / kAlignment * kAlignment;
    data = std::aligned_alloc(kAlignment, rounded == 0 ? kAlignment : rounded);
  }
  if (data == nullptr) {
    return absl::ResourceExhaustedError(absl::StrCat("no memory for ", size, " bytes of weights (",
                                                     machine_bytes, " bytes in this machine)"));
  }
  return Storage{
      std::shared_ptr<const void>(data, [](const void* p) { std::free(const_cast<void*>(p)); }),
      {static_cast<std::byte*>(data), size}};
}

}  // namespace gdn::model
