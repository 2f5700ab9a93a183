#include <cstdio>
#include <ctime>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/gdnctl/command.h"
#include "client/cpp/gdnctl/json.h"

namespace gdn::gdnctl {
namespace {

struct SessionFlags {
  std::string id;
  std::vector<std::string> ids;
  std::optional<int64_t> ttl_ms;
  std::optional<int64_t> expected_position;
  std::optional<int32_t> count;
};

std::string UtcTime(int64_t unix_ms) {
  const std::time_t seconds = static_cast<std::time_t>(unix_ms / 1000);
  std::tm parts = {};
  char buffer[32];
  if (gmtime_r(&seconds, &parts) == nullptr ||
      std::strftime(buffer, sizeof(buffer), "%Y-%m-%dT%H:%M:%SZ", &parts) == 0) {
    return absl::StrCat(unix_ms);
  }
  return buffer;
}

std::string Ttl(int64_t ttl_ms) {
  return ttl_ms == 0 ? "never evicted" : absl::StrCat(ttl_ms, " ms after its last use");
}

void PrintSession(const v1::Session& session) {
  std::printf("session    %s\n", session.session_id().c_str());
  std::printf("position   %lld\n", static_cast<long long>(session.position()));
  std::printf("hash       %016llx\n", static_cast<unsigned long long>(session.token_hash()));
  std::printf("created    %s\n", UtcTime(session.create_time_ms()).c_str());
  std::printf("last used  %s\n", UtcTime(session.last_use_time_ms()).c_str());
  std::printf("evicted    %s\n", Ttl(session.ttl_ms()).c_str());
  std::printf("in use     %s\n", session.in_use() ? "yes" : "no");
  std::printf("state      %lld bytes\n", static_cast<long long>(session.state_bytes()));
  if (!session.parent_session_id().empty()) {
    std::printf("forked of  %s\n", session.parent_session_id().c_str());
  }
}

void PrintTable(const std::vector<v1::Session>& sessions) {
  if (sessions.empty()) return;
  int width = static_cast<int>(sizeof("SESSION"));
  for (const v1::Session& session : sessions) {
    width = std::max(width, static_cast<int>(session.session_id().size()));
  }
  std::printf("%-*s  %10s  %-6s  %-20s  %s\n", width, "SESSION", "POSITION", "IN USE", "LAST USED",
              "FORKED OF");
  for (const v1::Session& session : sessions) {
    std::printf("%-*s  %10lld  %-6s  %-20s  %s\n", width, session.session_id().c_str(),
                static_cast<long long>(session.position()), session.in_use() ? "yes" : "no",
                UtcTime(session.last_use_time_ms()).c_str(),
                session.parent_session_id().empty() ? "-" : session.parent_session_id().c_str());
  }
}

ExitCode Create(const GlobalFlags& flags, client::Client* client, const SessionFlags& args) {
  const auto session = client->CreateSession(args.ttl_ms);
  if (!session.ok()) return ReportFailure(flags, "create a session", session.status());
  // The bare id, so that a shell can keep it: S=$(gdnctl session create).
  std::fputs(flags.json ? Line(ToJson(*session)).c_str() : (session->session_id() + "\n").c_str(),
             stdout);
  return ExitCode::kOk;
}

ExitCode List(const GlobalFlags& flags, client::Client* client, const SessionFlags&) {
  const auto sessions = client->ListAllSessions();
  if (!sessions.ok()) return ReportFailure(flags, "list the sessions", sessions.status());
  if (!flags.json) {
    PrintTable(*sessions);
    return ExitCode::kOk;
  }
  for (const v1::Session& session : *sessions) std::fputs(Line(ToJson(session)).c_str(), stdout);
  return ExitCode::kOk;
}

ExitCode Get(const GlobalFlags& flags, client::Client* client, const SessionFlags& args) {
  const auto session = client->GetSession(args.id);
  if (!session.ok()) {
    return ReportFailure(flags, "show session '" + args.id + "'", session.status());
  }
  if (flags.json) {
    std::fputs(Line(ToJson(*session)).c_str(), stdout);
  } else {
    PrintSession(*session);
  }
  return ExitCode::kOk;
}

ExitCode Fork(const GlobalFlags& flags, client::Client* client, const SessionFlags& args) {
  v1::ForkSessionRequest request;
  request.set_session_id(args.id);
  if (args.expected_position) request.set_expected_position(*args.expected_position);
  if (args.count) request.set_count(*args.count);
  if (args.ttl_ms) request.set_ttl_ms(*args.ttl_ms);
  const auto sessions = client->ForkSession(request);
  if (!sessions.ok()) {
    return ReportFailure(flags, "fork session '" + args.id + "'", sessions.status());
  }
  for (const v1::Session& session : *sessions) {
    std::fputs(flags.json ? Line(ToJson(session)).c_str() : (session.session_id() + "\n").c_str(),
               stdout);
  }
  return ExitCode::kOk;
}

// Goes on after a failure, so that one wrong id does not keep the others alive.
ExitCode Delete(const GlobalFlags& flags, client::Client* client, const SessionFlags& args) {
  ExitCode result = ExitCode::kOk;
  for (const std::string& id : args.ids) {
    const auto position = client->DeleteSession(id);
    if (!position.ok()) {
      result = ReportFailure(flags, "delete session '" + id + "'", position.status());
    } else if (flags.json) {
      std::fputs(Line({{"session_id", id}, {"position", *position}}).c_str(), stdout);
    } else {
      std::printf("deleted %s at position %lld\n", id.c_str(), static_cast<long long>(*position));
    }
  }
  return result;
}

using Action = ExitCode (*)(const GlobalFlags&, client::Client*, const SessionFlags&);

CLI::App* AddAction(CLI::App* app, Command* command, const std::shared_ptr<SessionFlags>& args,
                    const std::string& name, const std::string& help, Action action) {
  CLI::App* subcommand = app->add_subcommand(name, help);
  subcommand->callback([command, args, name, action] {
    command->run = [command, args, name, action] {
      const GlobalFlags& flags = command->flags;
      const auto client = Connect(flags);
      if (!client.ok()) return ReportFailure(flags, name + " sessions", client.status());
      const ExitCode result = action(flags, client->get(), *args);
      const ExitCode flushed = FlushOutput(flags);
      return result == ExitCode::kOk ? flushed : result;
    };
  });
  return subcommand;
}

}  // namespace

void AddSessionCommands(CLI::App* app, Command* command) {
  CLI::App* session = app->add_subcommand("session", "Create, show, fork and delete sessions");
  session->require_subcommand(1);
  const auto args = std::make_shared<SessionFlags>();
  const char* ttl_help = "Evict it this long after its last use; 0: never";

  CLI::App* create =
      AddAction(session, command, args, "create", "Create a session and print its id", Create);
  create->add_option("--ttl-ms", args->ttl_ms, ttl_help);
  AddAction(session, command, args, "list", "List the sessions alive", List);
  CLI::App* get = AddAction(session, command, args, "get", "Show one session", Get);
  get->add_option("id", args->id, "Session id")->required();
  CLI::App* fork = AddAction(session, command, args, "fork",
                             "Copy a session's state into new ones and print their ids", Fork);
  fork->add_option("id", args->id, "Session id")->required();
  fork->add_option("--count", args->count, "Number of copies (default 1)");
  fork->add_option("--ttl-ms", args->ttl_ms, ttl_help);
  fork->add_option("--expected-position", args->expected_position,
                   "Refuse if the session is not at this position");
  CLI::App* remove = AddAction(session, command, args, "delete", "Free sessions' states", Delete);
  remove->add_option("id", args->ids, "Session ids")->required();
}

}  // namespace gdn::gdnctl
