#include "server/options.h"

#include <CLI/CLI.hpp>
#include <charconv>
#include <cmath>
#include <map>
#include <string_view>
#include <thread>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "server/rpc/utf8.h"

namespace gdn {
namespace {

using pipeline::Precision;
using pipeline::StateType;

const std::map<std::string, Device> kDevices = {
    {"auto", Device::kAuto}, {"cpu", Device::kCpu}, {"cuda", Device::kCuda}};
const std::map<std::string, Precision> kPrecisions = {{"bfloat16", Precision::kBFloat16},
                                                      {"float32", Precision::kFloat32}};
const std::map<std::string, StateType> kStateTypes = {{"bfloat16", StateType::kBFloat16},
                                                      {"float32", StateType::kFloat32}};
const std::map<std::string, LogFormat> kLogFormats = {{"text", LogFormat::kText},
                                                      {"json", LogFormat::kJson}};
const std::map<std::string, LogLevel> kLogLevels = {{"debug", LogLevel::kDebug},
                                                    {"info", LogLevel::kInfo},
                                                    {"warning", LogLevel::kWarning},
                                                    {"error", LogLevel::kError}};

const std::map<std::string, rpc::LoggedRequests> kRequestLogs = {
    {"none", rpc::LoggedRequests::kNone},
    {"failures", rpc::LoggedRequests::kFailures},
    {"all", rpc::LoggedRequests::kAll}};

template <typename Enum>
std::string NameOf(const std::map<std::string, Enum>& names, Enum value) {
  for (const auto& [name, named] : names) {
    if (named == value) return name;
  }
  return {};
}

// As given, before it is understood.
struct RawFlags {
  std::string random_weights;
  std::string layers;
  std::string device = "auto";
  std::string precision = "bfloat16";
  std::string state_type = "float32";
  double session_ttl_s = 600;
  std::string metrics_listen = "127.0.0.1:9090";
  std::string log_requests = "failures";
  std::string log_format = "text";
  std::string log_level = "info";
  bool version = false;
};

// The checks, without the text that they would add to each line of --help.
template <typename Number>
CLI::Validator InRange(Number min, Number max) {
  return CLI::Range(min, max).description("");
}

template <typename Enum>
CLI::Validator OneOf(const std::map<std::string, Enum>& names) {
  std::vector<std::string> values;
  for (const auto& [name, value] : names) values.push_back(name);
  return CLI::IsMember(values).description("");
}

void AddModel(CLI::App& app, ServerOptions& options, RawFlags& raw) {
  app.add_option("--model", options.model.load.path,
                 "Folder of a checkpoint: config.json and safetensors")
      ->type_name("PATH")
      ->group("Model");
  app.add_option("--model-name", options.model.name, "Name to report [the folder's]")
      ->type_name("NAME")
      ->group("Model");
  app.add_option_function<std::vector<std::string>>(
         "--random-weights",
         [&raw](const std::vector<std::string>& values) {
           raw.random_weights = values.empty() || values[0].empty() ? "0" : values[0];
         },
         "Make the weights up from this seed [0]; needs config.json alone")
      ->expected(0, 1)
      ->type_name("[=SEED]")
      ->group("Model");
  app.add_option("--layers", raw.layers, "Serve layers a..b-1 of the stack [all]")
      ->type_name("a:b")
      ->group("Model");
}

void AddDevice(CLI::App& app, ServerOptions& options, RawFlags& raw) {
  app.add_option("--device", raw.device, "cpu, cuda, or auto: a GPU if there is one")
      ->capture_default_str()
      ->type_name("NAME")
      ->group("Device");
  app.add_option("--device-index", options.device.index, "Which GPU, as CUDA counts them")
      ->capture_default_str()
      ->check(InRange(0, 1023))
      ->type_name("N")
      ->group("Device");
  app.add_option("--cpu-threads", options.device.cpu_threads,
                 "Threads of the arithmetic; 0: one per core")
      ->capture_default_str()
      ->check(InRange(0, 1024))
      ->type_name("N")
      ->group("Device");
  app.add_option("--precision", raw.precision,
                 "Arithmetic of the matrix products: bfloat16 or float32")
      ->capture_default_str()
      ->check(OneOf(kPrecisions))
      ->type_name("TYPE")
      ->group("Device");
  app.add_flag("--batch-invariant", options.device.batch_invariant,
               "A sequence's bits do not depend on the batch it shares; slower")
      ->group("Device");
  app.add_option("--state-type", raw.state_type,
                 "Element type of the recurrent state: float32 or bfloat16")
      ->capture_default_str()
      ->check(OneOf(kStateTypes))
      ->type_name("TYPE")
      ->group("Device");
}

CLI::Option* AddCount(CLI::App& app, const std::string& flag, int64_t& value, int64_t min,
                      int64_t max, const std::string& help) {
  return app.add_option(flag, value, help)
      ->capture_default_str()
      ->check(InRange(min, max))
      ->type_name("N");
}

void AddEngine(CLI::App& app, ServerOptions& options, RawFlags& raw) {
  engine::EngineOptions& engine = options.engine;
  const char* group = "Engine";
  AddCount(app, "--max-sessions", options.max_sessions, 0, 1 << 20,
           "Sessions that can be alive at a time, one state each; 0: 48, on a GPU as many as fit")
      ->group(group);
  app.add_option("--session-ttl-s", raw.session_ttl_s,
                 "Seconds after its last use at which a session is evicted; 0: never")
      ->capture_default_str()
      ->check(InRange(0.0, 1e9))
      ->type_name("S")
      ->group(group);
  AddCount(app, "--max-batch-rows", engine.max_batch_rows, 1, 1 << 16,
           "Sequences the engine runs in one step")
      ->group(group);
  AddCount(app, "--prefill-token-budget", engine.prefill_token_budget, 1, 1 << 20,
           "Prompt tokens in one step; fewer: smoother streams, slower prompts")
      ->group(group);
  AddCount(app, "--prefill-chunk-tokens", engine.prefill_chunk_tokens, 1, 1 << 20,
           "Tokens at whose multiples a prompt is cut")
      ->group(group);
  AddCount(app, "--max-queued-calls", engine.max_queued_calls, 1, 1 << 20,
           "Calls admitted and unfinished, beyond which calls are refused")
      ->group(group);
  AddCount(app, "--stream-buffer-tokens", engine.stream_buffer_tokens, 1, 1 << 20,
           "Undelivered tokens at which a stream pauses")
      ->group(group);
  AddCount(app, "--max-new-tokens", engine.max_new_tokens, 1, int64_t{1} << 40,
           "Most tokens of one Generate call")
      ->group(group);
}

void AddServer(CLI::App& app, ServerOptions& options) {
  const char* group = "Server";
  app.add_option("--listen", options.rpc.listen, "Address of gRPC; port 0: any free one")
      ->capture_default_str()
      ->type_name("HOST:PORT")
      ->group(group);
  app.add_option("--port-file", options.port_file, "Write the port in use to this file")
      ->type_name("PATH")
      ->group(group);
  app.add_option("--rpc-threads", options.rpc.threads, "Threads that serve gRPC")
      ->capture_default_str()
      ->check(InRange(1, 64))
      ->type_name("N")
      ->group(group);
  app.add_option("--max-concurrent-streams", options.rpc.max_concurrent_streams,
                 "Calls at a time on one connection; more wait at the client")
      ->capture_default_str()
      ->check(InRange(1, 1 << 20))
      ->type_name("N")
      ->group(group);
  AddCount(app, "--drain-timeout-s", options.drain_timeout_s, 0, 86'400,
           "Seconds running calls may go on after SIGTERM")
      ->group(group);
}

void AddMetricsAndLogging(CLI::App& app, ServerOptions& options, RawFlags& raw) {
  app.add_option("--metrics-listen", raw.metrics_listen,
                 "Address of HTTP /metrics; port 0: any free one; off: none")
      ->capture_default_str()
      ->type_name("HOST:PORT")
      ->group("Metrics");
  AddCount(app, "--kernel-timing-interval", options.device.kernel_timing_interval, 0, 1 << 20,
           "Time the ops of every Nth step of a GPU, on the CPU of each; 0: of none")
      ->group("Metrics");
  app.add_option("--log-requests", raw.log_requests,
                 "A line for each call that is over: none, failures of the server, or all")
      ->capture_default_str()
      ->check(OneOf(kRequestLogs))
      ->type_name("WHICH")
      ->group("Logging");
  app.add_flag("--log-prompts", options.rpc.log.prompts,
               "Such a line has the input's token ids in it")
      ->group("Logging");
  app.add_option("--log-format", raw.log_format, "text or json, one line an event, to stderr")
      ->capture_default_str()
      ->check(OneOf(kLogFormats))
      ->type_name("FORMAT")
      ->group("Logging");
  app.add_option("--log-level", raw.log_level, "debug, info, warning or error")
      ->capture_default_str()
      ->check(OneOf(kLogLevels))
      ->type_name("LEVEL")
      ->group("Logging");
  app.set_help_flag("--help,-h", "Print this and exit");
  app.add_flag("--version", raw.version, "Print the version and exit");
}

template <typename Int>
bool ParseInt(std::string_view text, Int* value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return error == std::errc() && end == text.data() + text.size();
}

absl::Status ParseLayers(const std::string& text, std::optional<model::LayerRange>* layers) {
  const size_t colon = text.find(':');
  const std::string_view view = text;
  model::LayerRange range;
  if (colon == std::string::npos || !ParseInt(view.substr(0, colon), &range.first) ||
      !ParseInt(view.substr(colon + 1), &range.last) || range.first < 0 ||
      range.last <= range.first) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--layers=", text, ": expected a:b with 0 <= a < b, which serves layers a..b-1"));
  }
  *layers = range;
  return absl::OkStatus();
}

// The port, if it is one, and not 0.
std::optional<int> FixedPort(const std::string& address) {
  const size_t colon = address.rfind(':');
  int port = 0;
  if (colon == std::string::npos || !ParseInt(std::string_view(address).substr(colon + 1), &port) ||
      port == 0) {
    return std::nullopt;
  }
  return port;
}

absl::Status CheckAddress(const char* flag, const std::string& address) {
  const size_t colon = address.rfind(':');
  int port = -1;
  if (colon == std::string::npos || colon == 0 ||
      !ParseInt(std::string_view(address).substr(colon + 1), &port) || port < 0 || port > 65535) {
    return absl::InvalidArgumentError(absl::StrCat(
        flag, "=", address, ": expected host:port with a port in 0..65535, as in 127.0.0.1:0"));
  }
  return absl::OkStatus();
}

absl::Status Interpret(const RawFlags& raw, ServerOptions* options) {
  if (options->model.load.path.empty()) {
    return absl::InvalidArgumentError(
        "--model is missing: give the folder of a checkpoint, or see --help");
  }
  if (!rpc::IsUtf8(options->model.name)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--model-name=", absl::CHexEscape(options->model.name),
                     ": is not UTF-8, so no client could be told"));
  }
  if (!raw.random_weights.empty()) {
    uint64_t seed = 0;
    if (!ParseInt(raw.random_weights, &seed)) {
      return absl::InvalidArgumentError(absl::StrCat("--random-weights=", raw.random_weights,
                                                     ": expected a non-negative integer seed"));
    }
    options->model.load.random_weights = seed;
  }
  if (!raw.layers.empty()) {
    absl::Status status = ParseLayers(raw.layers, &options->model.load.layers);
    if (!status.ok()) return status;
  }
  if (absl::Status status = CheckAddress("--listen", options->rpc.listen); !status.ok()) {
    return status;
  }
  options->metrics.listen = raw.metrics_listen == "off" ? "" : raw.metrics_listen;
  if (!options->metrics.listen.empty()) {
    absl::Status status = CheckAddress("--metrics-listen", options->metrics.listen);
    if (!status.ok()) return status;
    const std::optional<int> port = FixedPort(options->metrics.listen);
    if (port && port == FixedPort(options->rpc.listen)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--listen=", options->rpc.listen, " and --metrics-listen=", options->metrics.listen,
          " name the same port; give them different ones"));
    }
  }
  if (std::isnan(raw.session_ttl_s)) {  // Within every range.
    return absl::InvalidArgumentError("--session-ttl-s=nan: expected a number of seconds");
  }
  if (options->engine.prefill_token_budget < options->engine.prefill_chunk_tokens) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--prefill-token-budget=", options->engine.prefill_token_budget,
        " is below --prefill-chunk-tokens=", options->engine.prefill_chunk_tokens,
        ", but a step takes at least one whole chunk; raise the budget or lower the chunk"));
  }
  const auto device = kDevices.find(raw.device);
  if (device == kDevices.end()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--device=", raw.device, ": expected auto, cpu or cuda"));
  }
  options->device.device = device->second;
  options->device.precision = kPrecisions.at(raw.precision);
  if (options->device.device == Device::kCuda &&
      options->device.precision == pipeline::Precision::kFloat32) {
    return absl::InvalidArgumentError(
        "--device=cuda and --precision=float32 conflict: the GPU multiplies in bfloat16; use "
        "--device=cpu, or drop --precision");
  }
  options->device.state_type = kStateTypes.at(raw.state_type);
  options->engine.default_ttl_ms = static_cast<int64_t>(std::ceil(raw.session_ttl_s * 1000.0));
  options->rpc.log.which = kRequestLogs.at(raw.log_requests);
  options->log.format = kLogFormats.at(raw.log_format);
  options->log.level = kLogLevels.at(raw.log_level);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::variant<ServerOptions, InfoText>> ParseOptions(int argc,
                                                                   const char* const* argv) {
  ServerOptions options;
  options.rpc.threads = std::thread::hardware_concurrency() > 4 ? 2 : 1;
  RawFlags raw;
  CLI::App app("Serves a Gated DeltaNet model over gRPC (gdn.v1).", "gdn_server");
  app.get_formatter()->column_width(44);
  AddModel(app, options, raw);
  AddDevice(app, options, raw);
  AddEngine(app, options, raw);
  AddServer(app, options);
  AddMetricsAndLogging(app, options, raw);
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    return InfoText{app.help()};
  } catch (const CLI::ParseError& error) {
    return absl::InvalidArgumentError(absl::StrCat(error.what(), "; see --help"));
  }
  if (raw.version) return InfoText{"gdn_server " GDN_VERSION "\n"};
  if (absl::Status status = Interpret(raw, &options); !status.ok()) return status;
  return options;
}

std::vector<std::string> DescribeOptions(const ServerOptions& options) {
  const model::LoadOptions& load = options.model.load;
  const engine::EngineOptions& engine = options.engine;
  std::vector<std::string> words = {absl::StrCat("--model=", load.path)};
  if (!options.model.name.empty()) {
    words.push_back(absl::StrCat("--model-name=", options.model.name));
  }
  if (load.random_weights) {
    words.push_back(absl::StrCat("--random-weights=", *load.random_weights));
  }
  if (load.layers) {
    words.push_back(absl::StrCat("--layers=", load.layers->first, ":", load.layers->last));
  }
  words.insert(
      words.end(),
      {absl::StrCat("--device=", NameOf(kDevices, options.device.device)),
       absl::StrCat("--device-index=", options.device.index),
       absl::StrCat("--cpu-threads=", options.device.cpu_threads),
       absl::StrCat("--precision=", NameOf(kPrecisions, options.device.precision)),
       absl::StrCat("--batch-invariant=", options.device.batch_invariant ? "true" : "false"),
       absl::StrCat("--state-type=", NameOf(kStateTypes, options.device.state_type)),
       absl::StrCat("--max-sessions=", options.max_sessions),
       absl::StrCat("--session-ttl-s=", static_cast<double>(engine.default_ttl_ms) / 1000.0),
       absl::StrCat("--max-batch-rows=", engine.max_batch_rows),
       absl::StrCat("--prefill-token-budget=", engine.prefill_token_budget),
       absl::StrCat("--prefill-chunk-tokens=", engine.prefill_chunk_tokens),
       absl::StrCat("--max-queued-calls=", engine.max_queued_calls),
       absl::StrCat("--stream-buffer-tokens=", engine.stream_buffer_tokens),
       absl::StrCat("--max-new-tokens=", engine.max_new_tokens),
       absl::StrCat("--listen=", options.rpc.listen),
       absl::StrCat("--rpc-threads=", options.rpc.threads),
       absl::StrCat("--max-concurrent-streams=", options.rpc.max_concurrent_streams),
       absl::StrCat("--drain-timeout-s=", options.drain_timeout_s),
       absl::StrCat("--metrics-listen=",
                    options.metrics.listen.empty() ? "off" : options.metrics.listen),
       absl::StrCat("--kernel-timing-interval=", options.device.kernel_timing_interval),
       absl::StrCat("--log-requests=", NameOf(kRequestLogs, options.rpc.log.which)),
       absl::StrCat("--log-prompts=", options.rpc.log.prompts ? "true" : "false"),
       absl::StrCat("--log-format=", NameOf(kLogFormats, options.log.format)),
       absl::StrCat("--log-level=", NameOf(kLogLevels, options.log.level))});
  if (!options.port_file.empty()) words.push_back(absl::StrCat("--port-file=", options.port_file));
  return words;
}

}  // namespace gdn
