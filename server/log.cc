#include "server/log.h"

#include <spdlog/formatter.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "server/rpc/log_fields.h"

namespace gdn {
namespace {

using spdlog::memory_buf_t;

void Append(std::string_view text, memory_buf_t* out) {
  out->append(text.data(), text.data() + text.size());
}

// The inside of a JSON string.
void AppendEscaped(std::string_view text, memory_buf_t* out) {
  for (const char c : text) {
    switch (c) {
      case '"':
      case '\\':
        out->push_back('\\');
        out->push_back(c);
        break;
      case '\n':
        Append("\\n", out);
        break;
      default:
        if (static_cast<unsigned char>(c) < 0x20) {
          char escape[8];
          std::snprintf(escape, sizeof(escape), "\\u%04x", static_cast<unsigned>(c));
          out->append(escape, escape + 6);
        } else {
          out->push_back(c);
        }
    }
  }
}

bool IsPlain(std::string_view value) {
  constexpr std::string_view kSpecial = " \"\\=";
  return !value.empty() && std::ranges::all_of(value, [&](char c) {
    return static_cast<unsigned char>(c) > 0x20 && kSpecial.find(c) == std::string_view::npos;
  });
}

void AppendField(std::string_view field, LogFormat format, memory_buf_t* out) {
  const size_t end = field.find_first_of("=:");
  if (end == std::string_view::npos) return;
  const std::string_view name = field.substr(0, end);
  const std::string_view value = field.substr(end + 1);
  const bool quoted = format == LogFormat::kJson ? field[end] == '=' : !IsPlain(value);
  Append(format == LogFormat::kJson ? ",\"" : " ", out);
  Append(name, out);
  Append(format == LogFormat::kJson ? "\":" : "=", out);
  if (quoted) out->push_back('"');
  quoted ? AppendEscaped(value, out) : Append(value, out);
  if (quoted) out->push_back('"');
}

// The message, and behind it its fields.
class Payload final : public spdlog::custom_flag_formatter {
 public:
  explicit Payload(LogFormat format) : format_(format) {}
  void format(const spdlog::details::log_msg& message, const std::tm&, memory_buf_t& out) override {
    std::string_view rest(message.payload.data(), message.payload.size());
    size_t end = rest.find(rpc::kFieldMark);
    if (format_ == LogFormat::kJson) {
      out.push_back('"');
      AppendEscaped(rest.substr(0, end), &out);
      out.push_back('"');
    } else {
      Append(rest.substr(0, end), &out);
    }
    while (end != std::string_view::npos) {
      rest.remove_prefix(end + 1);
      end = rest.find(rpc::kFieldMark);
      AppendField(rest.substr(0, end), format_, &out);
    }
  }
  std::unique_ptr<custom_flag_formatter> clone() const override {
    return std::make_unique<Payload>(format_);
  }

 private:
  const LogFormat format_;
};

spdlog::level::level_enum ToSpdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarning:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
  }
  return spdlog::level::info;
}

}  // namespace

void InitLog(const LogOptions& options) {
  auto sink = std::make_shared<spdlog::sinks::stderr_sink_mt>();
  auto formatter = std::make_unique<spdlog::pattern_formatter>(spdlog::pattern_time_type::utc);
  formatter->add_flag<Payload>('*', options.format)
      .set_pattern(options.format == LogFormat::kJson
                       ? R"({"time":"%Y-%m-%dT%H:%M:%S.%eZ","level":"%l","message":%*})"
                       : "%Y-%m-%dT%H:%M:%S.%eZ %l %*");
  sink->set_formatter(std::move(formatter));
  auto logger = std::make_shared<spdlog::logger>("gdn", std::move(sink));
  logger->set_level(ToSpdlog(options.level));
  logger->flush_on(spdlog::level::debug);
  spdlog::set_default_logger(std::move(logger));
}

}  // namespace gdn
