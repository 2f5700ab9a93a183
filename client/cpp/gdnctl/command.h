// The frame every command fits into: global flags, the connection, and the report of a failure.
#ifndef CLIENT_CPP_GDNCTL_COMMAND_H_
#define CLIENT_CPP_GDNCTL_COMMAND_H_

#include <CLI/CLI.hpp>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "client/cpp/gdnctl/exit_code.h"
#include "gdn/client/client.h"

namespace gdn::gdnctl {

struct GlobalFlags {
  std::string server = "127.0.0.1:50051";
  double timeout_s = 0;
  double connect_timeout_s = 2;
  bool json = false;
};

// Filled while the command line is parsed; main() runs it afterwards.
struct Command {
  GlobalFlags flags;
  std::function<ExitCode()> run;
};

// Each adds its subcommands to `app`; `command` outlives the app's parsing.
void AddHealthCommand(CLI::App* app, Command* command);
void AddModelCommand(CLI::App* app, Command* command);
void AddGenerateCommand(CLI::App* app, Command* command);
void AddSessionCommands(CLI::App* app, Command* command);
void AddSequenceCommands(CLI::App* app, Command* command);  // prefill and step

absl::StatusOr<std::unique_ptr<client::Client>> Connect(const GlobalFlags& flags);

// Prints what failed, why, and what to do about it to standard error: a sentence or two, or one
// JSON object with --json. `what` completes "cannot ...".
ExitCode ReportFailure(const GlobalFlags& flags, const std::string& what,
                       const absl::Status& status);
// The same for mistakes in the command line or its files.
ExitCode ReportUsage(const GlobalFlags& flags, const absl::Status& status);

// Flushes what was printed to standard output. A failure, e.g. a full disk, is reported.
ExitCode FlushOutput(const GlobalFlags& flags);

}  // namespace gdn::gdnctl

#endif  // CLIENT_CPP_GDNCTL_COMMAND_H_
