// gdn_server: flags -> ServerOptions -> Server.
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <spdlog/spdlog.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <thread>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "server/log.h"
#include "server/options.h"
#include "server/server.h"

namespace {

// Exit statuses: 0 stopped as asked, 1 cannot start, 2 wrong flags, 128 + n second signal n.
constexpr int kCannotStart = 1;
constexpr int kWrongFlags = 2;

// The first signal stops the server in order, a second one at once.
void WatchSignals(const sigset_t& signals, gdn::Server* server) {
  int signal = 0;
  sigwait(&signals, &signal);
  if (!server->ready()) {  // Nothing to drain yet.
    spdlog::info("stopped while loading");
    std::_Exit(EXIT_SUCCESS);
  }
  server->RequestStop();
  sigwait(&signals, &signal);
  spdlog::warn("second signal: exiting at once");
  std::_Exit(128 + signal);
}

// As many open files as the hard limit allows: each connection is one.
void RaiseFileLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  if (setrlimit(RLIMIT_NOFILE, &limit) != 0) spdlog::warn("cannot raise the limit of open files");
}

// By default malloc makes eight arenas a core, each of which keeps what it once held. The threads
// that allocate while serving are few: the engine's, gRPC's pollers and a handful of its own.
void LimitMallocArenas() {
  constexpr int kArenas = 4;
  mallopt(M_ARENA_MAX, kArenas);
}

int Serve(const gdn::ServerOptions& options) {
  // Blocked here, so in every thread there will be, except where sigwait waits for them.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  signal(SIGPIPE, SIG_IGN);  // A log whose reader has gone is no reason to stop.
  RaiseFileLimit();

  spdlog::info("configuration: {}", absl::StrJoin(gdn::DescribeOptions(options), " "));
  auto created = gdn::Server::Create(options);
  if (!created.ok()) {
    spdlog::error("cannot start: {}", std::string(created.status().message()));
    return kCannotStart;
  }
  // Kept until the process ends: taking down the HTTP endpoint alone would last two seconds.
  gdn::Server* const server = created->release();
  std::thread(WatchSignals, signals, server).detach();
  spdlog::info(
      "listening on {}, metrics {}", server->address(),
      options.metrics.listen.empty() ? "off" : absl::StrCat("port ", server->metrics_port()));
  if (absl::Status status = server->Load(); !status.ok()) {
    spdlog::error("cannot start: {}", std::string(status.message()));
    return kCannotStart;
  }
  server->Run();
  return EXIT_SUCCESS;
}

}  // namespace

int main(int argc, char** argv) {
  // The distribution's Abseil is built without NDEBUG: its lock-order check is slow, and fatal.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  LimitMallocArenas();  // Before there are threads.
  auto parsed = gdn::ParseOptions(argc, argv);
  if (!parsed.ok()) {
    std::fprintf(stderr, "gdn_server: %s\n", std::string(parsed.status().message()).c_str());
    return kWrongFlags;
  }
  if (const auto* info = std::get_if<gdn::InfoText>(&*parsed)) {
    std::fputs(info->text.c_str(), stdout);
    return EXIT_SUCCESS;
  }
  const auto& options = std::get<gdn::ServerOptions>(*parsed);
  gdn::InitLog(options.log);
  std::_Exit(Serve(options));  // The log is flushed line by line, and threads may still run.
}
