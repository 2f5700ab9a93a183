#include "client/cpp/gdnctl/text.h"

#include <cstdio>

namespace gdn::gdnctl {
namespace {

constexpr char kReplacement[] = "\xEF\xBF\xBD";

std::string Hex(uint8_t byte) {
  char buffer[8];
  std::snprintf(buffer, sizeof(buffer), "\\x%02x", byte);
  return buffer;
}

}  // namespace

std::string Utf8Stream::Append(std::string_view bytes) {
  std::string text;
  for (size_t i = 0; i < bytes.size(); ++i) {
    const uint8_t byte = static_cast<uint8_t>(bytes[i]);
    if (missing_ > 0) {
      if (byte >= low_ && byte <= high_) {
        held_ += bytes[i];
        low_ = 0x80;
        high_ = 0xBF;
        if (--missing_ == 0) {
          text += held_;
          held_.clear();
        }
        continue;
      }
      text += Finish();  // The held part ends here; this byte may begin something new.
    }
    if (byte < 0x80) {
      text += bytes[i];
    } else if (byte >= 0xC2 && byte <= 0xF4) {
      missing_ = byte < 0xE0 ? 1 : byte < 0xF0 ? 2 : 3;
      // Overlong forms, surrogates and code points over U+10FFFF show in the second byte.
      low_ = byte == 0xE0 ? 0xA0 : byte == 0xF0 ? 0x90 : 0x80;
      high_ = byte == 0xED ? 0x9F : byte == 0xF4 ? 0x8F : 0xBF;
      held_ = bytes[i];
    } else {
      text += kReplacement;
    }
  }
  return text;
}

std::string Utf8Stream::Finish() {
  if (missing_ == 0) return "";
  held_.clear();
  missing_ = 0;
  low_ = 0x80;
  high_ = 0xBF;
  return kReplacement;
}

std::string EscapeControls(std::string_view text) {
  std::string escaped;
  for (size_t i = 0; i < text.size(); ++i) {
    const uint8_t byte = static_cast<uint8_t>(text[i]);
    if ((byte < 0x20 && byte != '\n' && byte != '\t') || byte == 0x7F) {
      escaped += Hex(byte);
    } else if (byte == 0xC2 && i + 1 < text.size() && static_cast<uint8_t>(text[i + 1]) < 0xA0) {
      // U+0080..U+009F: some terminals take them for escape sequences.
      escaped += Hex(static_cast<uint8_t>(text[++i]));
    } else {
      escaped += text[i];
    }
  }
  return escaped;
}

std::string QuoteByte(uint8_t byte) {
  if (byte == '\n') return "'\\n'";
  if (byte == '\t') return "'\\t'";
  std::string quoted = "'";
  if (byte < 0x20 || byte >= 0x7F) {
    quoted += Hex(byte);
  } else {
    if (byte == '\\' || byte == '\'') quoted += '\\';
    quoted += static_cast<char>(byte);
  }
  quoted += '\'';
  return quoted;
}

}  // namespace gdn::gdnctl
