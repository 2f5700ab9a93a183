#include "client/cpp/gdnctl/command.h"

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gdn/client/status.h"

namespace gdn::gdnctl {
namespace {

std::chrono::milliseconds Milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1e3));
}

// What the reader can do next, or nothing.
std::string Advice(const GlobalFlags& flags, const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kUnavailable:
      return absl::StrCat("Check that gdn_server is running, ready and listening on ", flags.server,
                          ", or name another server with --server or GDN_SERVER.");
    case absl::StatusCode::kDeadlineExceeded:
      return "Allow more time with --timeout.";
    case absl::StatusCode::kNotFound:
      if (!absl::StrContains(status.message(), "session")) return "";
      return "'gdnctl session list' shows the sessions that are alive, 'gdnctl session create' "
             "makes one.";
    case absl::StatusCode::kFailedPrecondition:
      if (const auto mismatch = client::GetPositionMismatch(status)) {
        return absl::StrCat("The session is at position ", mismatch->actual_position(),
                            ": send what follows it, with --expected-position ",
                            mismatch->actual_position(), " or without the flag.");
      }
      return "'gdnctl model' shows which layers the server holds.";
    case absl::StatusCode::kAborted:
      return "Try again when the other call has ended.";
    case absl::StatusCode::kResourceExhausted:
      if (const auto delay = client::GetRetryDelay(status)) {
        return absl::StrCat("Try again in ", delay->count(),
                            " ms, or free a slot with 'gdnctl session delete'.");
      }
      return "'gdnctl model' shows the server's limits.";
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kOutOfRange:
      return "'gdnctl model' shows the model's dimensions and the server's limits.";
    case absl::StatusCode::kUnimplemented:
      return absl::StrCat("Is it a gdn server of this version that listens on ", flags.server, "?");
    case absl::StatusCode::kDataLoss:
      return "Delete the session and feed its input to a new one.";
    default:
      return "The server's log may say more.";
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<client::Client>> Connect(const GlobalFlags& flags) {
  client::ClientOptions options;
  options.connect_timeout = Milliseconds(flags.connect_timeout_s);
  if (flags.timeout_s > 0) options.call_timeout = Milliseconds(flags.timeout_s);
  return client::Client::Connect(flags.server, options);
}

ExitCode ReportFailure(const GlobalFlags& flags, const std::string& what,
                       const absl::Status& status) {
  const ExitCode exit_code = ToExitCode(status.code());
  const std::string code = absl::StatusCodeToString(status.code());
  const std::string message(status.message());
  const std::string advice = Advice(flags, status);
  if (!flags.json) {
    std::fprintf(stderr, "gdnctl: cannot %s: %s [%s]\n  %s\n", what.c_str(), message.c_str(),
                 code.c_str(), advice.c_str());
    return exit_code;
  }
  nlohmann::ordered_json error = {{"what", what},
                                  {"code", code},
                                  {"message", message},
                                  {"advice", advice},
                                  {"exit_code", static_cast<int>(exit_code)}};
  if (const auto mismatch = client::GetPositionMismatch(status)) {
    error["session_id"] = mismatch->session_id();
    error["expected_position"] = mismatch->expected_position();
    error["actual_position"] = mismatch->actual_position();
  }
  if (const auto delay = client::GetRetryDelay(status)) error["retry_delay_ms"] = delay->count();
  const nlohmann::ordered_json line = {{"error", error}};
  std::fprintf(stderr, "%s\n",
               line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
  return exit_code;
}

ExitCode ReportUsage(const GlobalFlags& flags, const absl::Status& status) {
  const std::string message(status.message());
  if (flags.json) {
    const nlohmann::ordered_json line = {{"error",
                                          {{"code", "USAGE"},
                                           {"message", message},
                                           {"exit_code", static_cast<int>(ExitCode::kUsage)}}}};
    std::fprintf(stderr, "%s\n",
                 line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
  } else {
    std::fprintf(stderr, "gdnctl: %s\n", message.c_str());
  }
  return ExitCode::kUsage;
}

ExitCode FlushOutput(const GlobalFlags& flags) {
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return ExitCode::kOk;
  return ReportUsage(flags, absl::UnknownError(absl::StrCat("cannot write to standard output: ",
                                                            std::strerror(errno))));
}

}  // namespace gdn::gdnctl
