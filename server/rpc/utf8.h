// What may be a `string` on the wire, which must be well-formed UTF-8.
#ifndef SERVER_RPC_UTF8_H_
#define SERVER_RPC_UTF8_H_

#include <cstddef>
#include <string>
#include <string_view>

namespace gdn::rpc {

// Bytes of the one well-formed character that `text` begins with; 0 if it begins with none.
inline size_t Utf8CharacterSize(std::string_view text) {
  const auto byte = [text](size_t i) { return static_cast<unsigned char>(text[i]); };
  if (text.empty()) return 0;
  const unsigned char lead = byte(0);
  if (lead < 0x80) return 1;
  if (lead < 0xC2 || lead > 0xF4) return 0;  // A stray trail, or a lead of no character.
  const size_t size = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  if (text.size() < size) return 0;
  for (size_t i = 1; i < size; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 0;
  }
  // Overlong forms, surrogates, and what is beyond U+10FFFF.
  if ((lead == 0xE0 && byte(1) < 0xA0) || (lead == 0xED && byte(1) > 0x9F) ||
      (lead == 0xF0 && byte(1) < 0x90) || (lead == 0xF4 && byte(1) > 0x8F)) {
    return 0;
  }
  return size;
}

inline bool IsUtf8(std::string_view text) {
  while (!text.empty()) {
    const size_t size = Utf8CharacterSize(text);
    if (size == 0) return false;
    text.remove_prefix(size);
  }
  return true;
}

// `text` with U+FFFD for each run of bytes that belongs to no character.
inline std::string RepairedUtf8(std::string_view text) {
  std::string repaired;
  repaired.reserve(text.size());
  bool broken = false;
  while (!text.empty()) {
    const size_t size = Utf8CharacterSize(text);
    if (size == 0 && !broken) repaired += "\xEF\xBF\xBD";
    repaired.append(text.substr(0, size));
    text.remove_prefix(size == 0 ? 1 : size);
    broken = size == 0;
  }
  return repaired;
}

}  // namespace gdn::rpc

#endif  // SERVER_RPC_UTF8_H_
