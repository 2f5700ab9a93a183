// Bytes as text that a terminal or a JSON string can take.
#ifndef CLIENT_CPP_GDNCTL_TEXT_H_
#define CLIENT_CPP_GDNCTL_TEXT_H_

#include <cstdint>
#include <string>
#include <string_view>

namespace gdn::gdnctl {

// Makes valid UTF-8 out of bytes that arrive in pieces: an incomplete sequence is held back until
// it is complete, and what cannot become one is U+FFFD, once per maximal part (Unicode 3.9).
class Utf8Stream {
 public:
  std::string Append(std::string_view bytes);
  // No more bytes follow: what is still held back is U+FFFD.
  std::string Finish();

 private:
  std::string held_;
  int missing_ = 0;  // Bytes that the held sequence lacks.
  uint8_t low_ = 0x80;
  uint8_t high_ = 0xBF;
};

// Valid UTF-8 with control characters other than newline and tab as "\xNN", so that no output can
// steer a terminal.
std::string EscapeControls(std::string_view text);

// A byte token for tables: 'G', '\n', '\xc3'.
std::string QuoteByte(uint8_t byte);

}  // namespace gdn::gdnctl

#endif  // CLIENT_CPP_GDNCTL_TEXT_H_
