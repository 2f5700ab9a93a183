#include "client/cpp/gdnctl/generate_output.h"

#include <cstdio>

#include "absl/strings/str_cat.h"
#include "client/cpp/gdnctl/json.h"

namespace gdn::gdnctl {
namespace {

const char* FinishReasonName(v1::FinishReason reason) {
  switch (reason) {
    case v1::FINISH_REASON_STOP:
      return "stop";
    case v1::FINISH_REASON_LENGTH:
      return "length";
    default:
      return "unknown";
  }
}

std::string Entry(bool byte_vocabulary, int32_t id, float logprob) {
  char number[32];
  std::snprintf(number, sizeof(number), "%.4f", static_cast<double>(logprob));
  const bool is_byte = byte_vocabulary && id >= 0 && id < 256;
  return absl::StrCat(id, " ", is_byte ? QuoteByte(static_cast<uint8_t>(id)) : "",
                      is_byte ? " " : "", number);
}

}  // namespace

std::string GenerateOutput::Format(const v1::GenerateResponse& response) {
  std::string text;
  switch (mode_) {
    case OutputMode::kRawBytes:
      text = Bytes(response);
      break;
    case OutputMode::kTerminal:
      text = EscapeControls(utf8_.Append(Bytes(response)));
      break;
    case OutputMode::kIds:
      for (const v1::Token& token : response.tokens()) {
        absl::StrAppend(&text, first_ && text.empty() ? "" : " ", token.id());
      }
      break;
    case OutputMode::kTable:
      text = Table(response);
      break;
    case OutputMode::kJson:
      text = JsonLine(response);
      break;
  }
  if (response.tokens_size() > 0) first_ = false;
  return text;
}

std::string GenerateOutput::Finish() {
  switch (mode_) {
    case OutputMode::kTerminal:
      return utf8_.Finish() + "\n";
    case OutputMode::kIds:
      return "\n";
    default:
      return "";
  }
}

// Tokens beyond the bytes, such as the end of the text, are no text.
std::string GenerateOutput::Bytes(const v1::GenerateResponse& response) const {
  std::string bytes;
  for (const v1::Token& token : response.tokens()) {
    if (token.id() >= 0 && token.id() < 256) bytes += static_cast<char>(token.id());
  }
  return bytes;
}

std::string GenerateOutput::Table(const v1::GenerateResponse& response) const {
  std::string text;
  for (const v1::Token& token : response.tokens()) {
    text += Entry(byte_vocabulary_, token.id(), token.logprob());
    const char* separator = "  |  ";
    for (const v1::TokenLogprob& top : token.top_logprobs()) {
      absl::StrAppend(&text, separator, Entry(byte_vocabulary_, top.id(), top.logprob()));
      separator = ", ";
    }
    text += '\n';
  }
  return text;
}

std::string GenerateOutput::JsonLine(const v1::GenerateResponse& response) {
  const bool last = response.finish_reason() != v1::FINISH_REASON_UNSPECIFIED;
  Json json = {{"tokens", Json::array()}};
  for (const v1::Token& token : response.tokens()) json["tokens"].push_back(ToJson(token));
  if (byte_vocabulary_) {
    std::string text = utf8_.Append(Bytes(response));
    if (last) text += utf8_.Finish();
    json["text"] = std::move(text);
  }
  json["position"] = response.position();
  if (response.has_seed()) json["seed"] = absl::StrCat(response.seed());
  if (last) {
    json["finish_reason"] = FinishReasonName(response.finish_reason());
    json["usage"] = ToJson(response.usage());
    json["timings"] = ToJson(response.timings());
  }
  return Line(json);
}

}  // namespace gdn::gdnctl
