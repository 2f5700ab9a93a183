// The safetensors container: 8 bytes of little-endian header length, a JSON header, the data.
//
// Accepts what the format's own implementation accepts: any order of names, any header length (so
// data may be unaligned), empty tensors; and refuses what it refuses: gaps, overlaps, a file longer
// or shorter than its tensors, sizes that do not match shape and type, overflow. Duplicate names,
// which it lets the last one win, are refused as well.
#ifndef SERVER_MODEL_SAFETENSORS_H_
#define SERVER_MODEL_SAFETENSORS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "server/model/dtype.h"
#include "server/model/mapped_file.h"

namespace gdn::model {

struct TensorInfo {
  std::string name;
  const Dtype* dtype = nullptr;
  std::vector<int64_t> shape;
  std::span<const std::byte> data;  // In the file; not necessarily aligned.
};

struct SafetensorsContents {
  std::vector<TensorInfo> tensors;  // Sorted by name.
  std::map<std::string, std::string> metadata;
};

// Validates a whole file's bytes; `name` is its name in messages. The result's data points into
// `file`.
absl::StatusOr<SafetensorsContents> ParseSafetensors(std::span<const std::byte> file,
                                                     const std::string& name);

class SafetensorsFile {
 public:
  static absl::StatusOr<std::shared_ptr<const SafetensorsFile>> Open(const std::string& path);

  const std::string& path() const { return file_->path(); }
  const std::vector<TensorInfo>& tensors() const { return contents_.tensors; }
  const TensorInfo* Find(std::string_view name) const;

 private:
  SafetensorsFile(std::shared_ptr<const MappedFile> file, SafetensorsContents contents);

  std::shared_ptr<const MappedFile> file_;
  SafetensorsContents contents_;
};

}  // namespace gdn::model

#endif  // SERVER_MODEL_SAFETENSORS_H_
