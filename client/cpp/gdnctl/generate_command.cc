#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "client/cpp/gdnctl/command.h"
#include "client/cpp/gdnctl/generate_output.h"
#include "client/cpp/gdnctl/input_flags.h"
#include "client/cpp/gdnctl/interrupt.h"
#include "client/cpp/gdnctl/json.h"

namespace gdn::gdnctl {
namespace {

using std::chrono::steady_clock;

struct GenerateFlags {
  InputFlags input;
  SamplingFlags sampling;
  std::string session_id;
  std::optional<int64_t> expected_position;
  std::optional<int64_t> max_new_tokens;
  std::string stop;
  bool ignore_eos = false;
  int32_t top_logprobs = 0;
  bool ids_only = false;
  bool stats = false;

  std::string what() const {
    return session_id.empty() ? "generate" : "continue session '" + session_id + "'";
  }
};

// The stream that an interrupt cancels, once there is one.
class Cancellation {
 public:
  void Set(client::GenerateStream* stream) {
    const std::lock_guard lock(mutex_);
    stream_ = stream;
    if (requested_ && stream_ != nullptr) stream_->Cancel();
  }
  void Request() {
    const std::lock_guard lock(mutex_);
    // Nothing has been asked of the server yet.
    if (stream_ == nullptr) _exit(static_cast<int>(ExitCode::kInterrupted));
    requested_ = true;
    stream_->Cancel();
  }

 private:
  std::mutex mutex_;
  client::GenerateStream* stream_ = nullptr;
  bool requested_ = false;
};

// As the caller sees it: the network and this program included.
struct Stats {
  steady_clock::time_point start = steady_clock::now();
  steady_clock::time_point first_token;
  steady_clock::time_point last_token;
  int64_t first_tokens = 0;  // In the message with the first token.
  int64_t tokens = 0;

  void Count(const v1::GenerateResponse& response) {
    if (response.tokens_size() == 0) return;
    last_token = steady_clock::now();
    if (tokens == 0) {
      first_token = last_token;
      first_tokens = response.tokens_size();
    }
    tokens += response.tokens_size();
  }

  void Print(bool json) const {
    const auto seconds = [](steady_clock::duration duration) {
      return std::chrono::duration<double>(duration).count();
    };
    const double total_s = seconds(last_token - start);
    const double first_s = seconds(first_token - start);
    const double rest_s = seconds(last_token - first_token);
    const double rate = rest_s > 0 ? static_cast<double>(tokens - first_tokens) / rest_s : 0.0;
    if (json) {
      Json line = {{"tokens", tokens}};
      if (tokens > 0) {
        line["time_to_first_token_s"] = first_s;
        line["tokens_per_second"] = rate;
        line["total_s"] = total_s;
      }
      std::fputs(Line({{"stats", line}}).c_str(), stderr);
    } else if (tokens == 0) {
      std::fputs("no tokens\n", stderr);
    } else {
      std::fprintf(stderr, "%lld tokens in %.3f s: first token after %.1f ms, then %.1f tokens/s\n",
                   static_cast<long long>(tokens), total_s, first_s * 1e3, rate);
    }
  }
};

// A terminal, or a log that takes both.
bool StdoutIsStderr() {
  struct stat out;
  struct stat err;
  return fstat(STDOUT_FILENO, &out) == 0 && fstat(STDERR_FILENO, &err) == 0 &&
         out.st_dev == err.st_dev && out.st_ino == err.st_ino;
}

OutputMode ChooseMode(const GlobalFlags& flags, const GenerateFlags& args, bool byte_vocabulary) {
  if (flags.json) return OutputMode::kJson;
  if (args.top_logprobs > 0) return OutputMode::kTable;
  if (args.ids_only || !byte_vocabulary) return OutputMode::kIds;
  return isatty(STDOUT_FILENO) == 1 ? OutputMode::kTerminal : OutputMode::kRawBytes;
}

absl::StatusOr<v1::GenerateRequest> BuildRequest(const GenerateFlags& args,
                                                 const v1::ModelInfo& model) {
  absl::StatusOr<v1::Input> input = ReadInput(args.input, model);
  if (!input.ok()) return input.status();
  v1::GenerateRequest request;
  *request.mutable_input() = *std::move(input);
  request.set_session_id(args.session_id);
  if (args.expected_position) request.set_expected_position(*args.expected_position);
  if (args.max_new_tokens) request.set_max_new_tokens(*args.max_new_tokens);
  const absl::StatusOr<std::vector<int32_t>> stop = ParseIds("--stop", args.stop);
  if (!stop.ok()) return stop.status();
  request.mutable_stop_token_ids()->Add(stop->begin(), stop->end());
  request.set_ignore_eos(args.ignore_eos);
  request.set_top_logprobs(args.top_logprobs);
  ApplySampling(args.sampling, request.mutable_sampling());
  return request;
}

ExitCode Run(const GlobalFlags& flags, const GenerateFlags& args) {
  Cancellation cancellation;
  const InterruptHandler interrupt([&cancellation] { cancellation.Request(); });
  const auto client = Connect(flags);
  if (!client.ok()) return ReportFailure(flags, args.what(), client.status());
  const v1::ModelInfo& model = (*client)->model();
  const absl::StatusOr<v1::GenerateRequest> request = BuildRequest(args, model);
  if (!request.ok()) return ReportUsage(flags, request.status());

  const OutputMode mode = ChooseMode(flags, args, model.byte_vocabulary());
  GenerateOutput output(mode, model.byte_vocabulary());
  Stats stats;
  ExitCode written = ExitCode::kOk;
  const std::unique_ptr<client::GenerateStream> stream = (*client)->Generate(*request);
  cancellation.Set(stream.get());
  const absl::Cleanup forget_stream = [&cancellation] { cancellation.Set(nullptr); };
  v1::GenerateResponse response;
  while (written == ExitCode::kOk && stream->Next(&response)) {
    stats.Count(response);
    const std::string text = output.Format(response);
    std::fwrite(text.data(), 1, text.size(), stdout);
    written = FlushOutput(flags);
  }
  const absl::Status status = stream->Finish();
  if (written != ExitCode::kOk) return written;
  if (stats.tokens > 0) std::fputs(output.Finish().c_str(), stdout);
  written = FlushOutput(flags);
  if (mode == OutputMode::kRawBytes && stats.tokens > 0 && StdoutIsStderr()) {
    std::fputc('\n',
               stderr);  // What follows on standard error would continue the text's last line.
  }
  if (args.stats) stats.Print(flags.json);
  if (interrupt.interrupted() && !status.ok()) {
    std::fputs(flags.json ? Line({{"error", {{"code", "INTERRUPTED"}, {"exit_code", 130}}}}).c_str()
                          : "gdnctl: interrupted\n",
               stderr);
    return ExitCode::kInterrupted;
  }
  if (!status.ok()) return ReportFailure(flags, args.what(), status);
  return written;
}

}  // namespace

void AddGenerateCommand(CLI::App* app, Command* command) {
  const auto args = std::make_shared<GenerateFlags>();
  CLI::App* sub = app->add_subcommand("generate", "Stream the continuation of an input");
  AddInputFlags(sub, &args->input, /*with_hidden=*/true);
  sub->add_option("--max-new-tokens", args->max_new_tokens, "End after this many (default 256)");
  sub->add_option("--stop", args->stop, "End after any of these token ids too: 10,46");
  sub->add_flag("--ignore-eos", args->ignore_eos, "Do not end on the model's own end tokens");
  sub->add_option(
      "--session", args->session_id,
      "Continue this session and leave it after the last token (default: a throw-away one)");
  sub->add_option("--expected-position", args->expected_position,
                  "Refuse if the session is not at this position");
  sub->add_option("--top-logprobs", args->top_logprobs,
                  "Print a line per token with the N likeliest alternatives");
  sub->add_flag("--output-ids", args->ids_only, "Print token ids where text is possible");
  sub->add_flag("--stats", args->stats,
                "Print the time to the first token and tokens per second to standard error");
  AddSamplingFlags(sub, &args->sampling);
  sub->callback(
      [command, args] { command->run = [command, args] { return Run(command->flags, *args); }; });
}

}  // namespace gdn::gdnctl
