// gdnctl: a gdn server from the command line.
#include <google/protobuf/stubs/logging.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/gdnctl/command.h"
#include "client/cpp/gdnctl/exit_code.h"
#include "client/cpp/gdnctl/interrupt.h"

namespace gdn::gdnctl {
namespace {

ExitCode Main(int argc, char** argv) {
  Command command;
  CLI::App app("Talks to a gdn server: describes its model, streams text, keeps sessions.",
               "gdnctl");
  app.footer(kExitCodeHelp);
  app.failure_message([](const CLI::App*, const CLI::Error& error) {
    return absl::StrCat("gdnctl: ", error.what(), "; see --help\n");
  });
  app.set_version_flag("--version", "gdnctl " GDN_VERSION)
      ->description("Print the version and exit");
  app.require_subcommand(1);
  app.fallthrough();
  app.add_option("--server", command.flags.server, "Server to talk to, as host:port")
      ->envname("GDN_SERVER")
      ->type_name("HOST:PORT")
      ->capture_default_str();
  app.add_option("--timeout", command.flags.timeout_s,
                 "Deadline of each call in seconds, a whole stream included; 0: none")
      ->check(CLI::Range(0.0, 1e6).description(""))
      ->type_name("SECONDS")
      ->capture_default_str();
  app.add_option("--connect-timeout", command.flags.connect_timeout_s,
                 "Seconds to go on trying to reach a server that is absent or not ready")
      ->check(CLI::Range(0.0, 1e6).description(""))
      ->type_name("SECONDS")
      ->capture_default_str();
  app.add_flag("--json", command.flags.json,
               "Print one JSON object per line, errors included (on standard error)");
  AddModelCommand(&app, &command);
  AddHealthCommand(&app, &command);
  AddGenerateCommand(&app, &command);
  AddSessionCommands(&app, &command);
  AddSequenceCommands(&app, &command);

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    // Help is a success; CLI11's own numbers for the rest are not ours.
    return app.exit(error) == 0 ? ExitCode::kOk : ExitCode::kUsage;
  }
  ExitOnInterrupt();
  return command.run();
}

}  // namespace
}  // namespace gdn::gdnctl

int main(int argc, char** argv) {
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  google::protobuf::SetLogHandler(nullptr);  // What fails is told by the call's status.
  return static_cast<int>(gdn::gdnctl::Main(argc, argv));
}
