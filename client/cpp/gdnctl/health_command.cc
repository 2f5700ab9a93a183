#include <cstdio>
#include <string>

#include "absl/strings/str_cat.h"
#include "client/cpp/gdnctl/command.h"
#include "gdn/client/health.h"

namespace gdn::gdnctl {

void AddHealthCommand(CLI::App* app, Command* command) {
  CLI::App* health =
      app->add_subcommand("health", "Ask once whether the server is ready; for probes");
  auto* service = health->add_option("--service", "Name of a service [the server as a whole]")
                      ->type_name("NAME");
  health->callback([command, service] {
    const std::string name = service->count() > 0 ? service->as<std::string>() : "";
    command->run = [command, name] {
      const GlobalFlags& flags = command->flags;
      const double timeout_s = flags.timeout_s > 0 ? flags.timeout_s : flags.connect_timeout_s;
      const auto serving = client::IsServing(
          flags.server, name, std::chrono::milliseconds(static_cast<int64_t>(timeout_s * 1e3)));
      if (!serving.ok()) return ReportFailure(flags, "ask for health", serving.status());
      if (!*serving) {
        return ReportFailure(flags, "use the server",
                             absl::UnavailableError("it is loading or draining"));
      }
      std::puts(flags.json ? R"({"status":"SERVING"})" : "SERVING");
      return FlushOutput(flags);
    };
  });
}

}  // namespace gdn::gdnctl
