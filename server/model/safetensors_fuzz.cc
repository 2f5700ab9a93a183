// Fuzz target: the safetensors reader. An input that begins with '{' is a header alone, up to the
// first zero byte, with the data behind it: the length field in front is made up here, so that
// mutations reach the checks behind it. Any other input is a whole file.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "server/model/safetensors.h"

namespace gdn::model {
namespace {

std::vector<std::byte> WithLength(std::string_view input) {
  const size_t header_size = std::min(input.find('\0'), input.size());
  const std::string_view data = input.substr(std::min(header_size + 1, input.size()));
  std::vector<std::byte> file(8 + header_size + data.size());
  for (size_t i = 0; i < 8; ++i) file[i] = static_cast<std::byte>(header_size >> (8 * i));
  if (header_size > 0) std::memcpy(file.data() + 8, input.data(), header_size);
  if (!data.empty()) std::memcpy(file.data() + 8 + header_size, data.data(), data.size());
  return file;
}

void Require(bool condition) {
  if (!condition) std::abort();
}

void Check(std::span<const std::byte> file) {
  const auto contents = ParseSafetensors(file, "fuzz.safetensors");
  if (!contents.ok()) {
    Require(!contents.status().message().empty());
    return;
  }
  size_t covered = 0;
  unsigned sum = 0;
  for (const TensorInfo& info : contents->tensors) {
    Require(info.dtype != nullptr);
    Require(info.data.empty() ||
            (info.data.data() >= file.data() &&
             info.data.data() + info.data.size() <= file.data() + file.size()));
    for (const std::byte b : info.data) sum += static_cast<unsigned>(b);  // Every byte is readable.
    covered += info.data.size();
  }
  volatile unsigned sink = sum;
  (void)sink;
  Require(covered <= file.size());
}

}  // namespace
}  // namespace gdn::model

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  if (!input.empty() && input.front() == '{') {
    gdn::model::Check(gdn::model::WithLength(input));
  } else {
    gdn::model::Check(std::as_bytes(std::span(data, size)));
  }
  return 0;
}
