// How the tokens of a stream are shown.
#ifndef CLIENT_CPP_GDNCTL_GENERATE_OUTPUT_H_
#define CLIENT_CPP_GDNCTL_GENERATE_OUTPUT_H_

#include <string>

#include "client/cpp/gdnctl/text.h"
#include "gdn/v1/inference.pb.h"

namespace gdn::gdnctl {

enum class OutputMode {
  kRawBytes,  // Byte tokens as they are; for pipes and files.
  kTerminal,  // Byte tokens as valid UTF-8 without control characters.
  kIds,       // Ids, separated by spaces.
  kTable,     // One token a line, with log probabilities.
  kJson,      // One message a line.
};

class GenerateOutput {
 public:
  GenerateOutput(OutputMode mode, bool byte_vocabulary)
      : mode_(mode), byte_vocabulary_(byte_vocabulary) {}

  // What to print for one message.
  std::string Format(const v1::GenerateResponse& response);
  // What to print after the last message, or after the stream broke.
  std::string Finish();

 private:
  std::string Bytes(const v1::GenerateResponse& response) const;
  std::string Table(const v1::GenerateResponse& response) const;
  std::string JsonLine(const v1::GenerateResponse& response);

  const OutputMode mode_;
  const bool byte_vocabulary_;
  Utf8Stream utf8_;
  bool first_ = true;
};

}  // namespace gdn::gdnctl

#endif  // CLIENT_CPP_GDNCTL_GENERATE_OUTPUT_H_
