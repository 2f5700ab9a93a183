// File: options.h
//
// Everything that can be configured, grouped by concern, and the command line that sets it. There
// is no other source: no environment variables, no files.
#ifndef SERVER_OPTIONS_H_
#define SERVER_OPTIONS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "server/engine/engine.h"
#include "server/model/weights.h"
#include "server/pipeline/cpu_pipeline.h"
#include "server/rpc/rpc_server.h"

namespace gdn {

struct ModelOptions {
  model::LoadOptions load;
  std::string name;  // Empty: the checkpoint folder's.
};

enum class Device { kAuto, kCpu, kCuda };

struct DeviceOptions {
  Device device = Device::kAuto;
  int32_t index = 0;        // Of the GPU, as the CUDA runtime counts them.
  int32_t cpu_threads = 0;  // 0: all cores.
  pipeline::Precision precision = pipeline::Precision::kBFloat16;
  bool batch_invariant = false;
  pipeline::StateType state_type = pipeline::StateType::kFloat32;
  // On a GPU, of each phase the first step and every so many after it have their ops timed one by
  // one; on the CPU those of all steps. 0: of none.
  int64_t kernel_timing_interval = 256;
};

struct MetricsOptions {
  std::string listen = "127.0.0.1:9090";  // Empty: off.
};

enum class LogFormat { kText, kJson };
enum class LogLevel { kDebug, kInfo, kWarning, kError };

// The log itself; rpc::RequestLogOptions says which calls have a line in it.
struct LogOptions {
  LogFormat format = LogFormat::kText;
  LogLevel level = LogLevel::kInfo;
};

struct ServerOptions {
  ModelOptions model;
  DeviceOptions device;
  engine::EngineOptions engine;
  // One state slot each; the engine has one more for its own use. 0: 48 on the CPU, on a GPU as
  // many as fit, at most 4095.
  int64_t max_sessions = 0;
  rpc::RpcOptions rpc;
  std::string port_file;
  int64_t drain_timeout_s = 30;
  MetricsOptions metrics;
  LogOptions log;
};

// What --help and --version print.
struct InfoText {
  std::string text;
};

// INVALID_ARGUMENT names the flag, what came and what is allowed, or the two flags that conflict.
absl::StatusOr<std::variant<ServerOptions, InfoText>> ParseOptions(int argc,
                                                                   const char* const* argv);

// The effective configuration as `--flag=value` words, all of them.
std::vector<std::string> DescribeOptions(const ServerOptions& options);

}  // namespace gdn

#endif  // SERVER_OPTIONS_H_
