// A file mapped read-only for as long as the object lives.
//
// The file must not change while it is mapped: a truncated file ends the process with SIGBUS on the
// next read, a rewritten one changes weights under way. Replace a checkpoint by writing a new
// folder.
#ifndef SERVER_MODEL_MAPPED_FILE_H_
#define SERVER_MODEL_MAPPED_FILE_H_

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace gdn::model {

class MappedFile {
 public:
  // NOT_FOUND if there is no such file, INVALID_ARGUMENT if it is not a regular one.
  static absl::StatusOr<std::shared_ptr<const MappedFile>> Open(const std::string& path);

  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  const std::string& path() const { return path_; }
  std::span<const std::byte> bytes() const { return {data_, size_}; }
  std::string_view text() const { return {reinterpret_cast<const char*>(data_), size_}; }

  // Read-ahead for a pass from front to back.
  void AdviseSequential() const;

 private:
  MappedFile(std::string path, const std::byte* data, size_t size);

  std::string path_;
  const std::byte* data_;
  size_t size_;
};

}  // namespace gdn::model

#endif  // SERVER_MODEL_MAPPED_FILE_H_
