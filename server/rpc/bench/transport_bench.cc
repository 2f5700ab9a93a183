// Completion queues under coroutines, which the server uses, against gRPC's callback API: echoed
// messages per second, and the first token after silence. Each server runs in a process of its own,
// the client is gRPC's plain synchronous one.
//
//   transport_bench [--seconds=S] [--idle-rounds=N]       both transports, an engine that costs
//   nothing transport_bench --address=HOST:PORT [--idle-rounds=N] first tokens of any running
//   server
#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "gdn/v1/inference.grpc.pb.h"
#include "server/rpc/bench/callback_server.h"
#include "server/rpc/bench/echo_engine.h"
#include "server/rpc/rpc_server.h"

namespace gdn::rpc {
namespace {

using Clock = std::chrono::steady_clock;

double Milliseconds(Clock::duration duration) {
  return std::chrono::duration<double, std::milli>(duration).count();
}

double Quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  return values[std::min(values.size() - 1, static_cast<size_t>(q * double(values.size())))];
}

// Serves until it is killed; tells its port on standard output.
[[noreturn]] void RunServer(const std::string& transport) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const engine::SystemClock clock;
  const std::unique_ptr<engine::Engine> engine = MakeEchoEngine();
  std::unique_ptr<CallbackServer> callback_server;
  std::unique_ptr<RpcServer> server;
  int port = 0;
  if (transport == "callback") {
    callback_server = MakeCallbackServer(engine.get(), 1);
    port = callback_server->port();
  } else {
    RpcOptions options;
    options.listen = "127.0.0.1:0";
    server = *RpcServer::Create(options, &clock, nullptr);
    ModelFacts facts;
    facts.hidden_size = 1;
    facts.vocab_size = 256;
    server->SetReady(engine.get(), facts);
    port = server->port();
  }
  std::printf("%d\n", port);
  std::fflush(stdout);
  for (;;) pause();
}

class ServerProcess {
 public:
  explicit ServerProcess(const std::string& transport) {
    int ends[2];
    if (pipe(ends) != 0) std::abort();
    pid_ = fork();
    if (pid_ == 0) {
      dup2(ends[1], STDOUT_FILENO);
      const std::string flag = "--serve=" + transport;
      execl("/proc/self/exe", "transport_bench", flag.c_str(), nullptr);
      _exit(1);
    }
    close(ends[1]);
    FILE* out = fdopen(ends[0], "r");
    if (std::fscanf(out, "%d", &port_) != 1) std::abort();
    std::fclose(out);
  }
  ~ServerProcess() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  double CpuSeconds() const {
    clockid_t clock;
    timespec time{};
    if (clock_getcpuclockid(pid_, &clock) != 0 || clock_gettime(clock, &time) != 0) return 0;
    return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
  }
  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }

 private:
  pid_t pid_ = 0;
  int port_ = 0;
};

std::shared_ptr<grpc::Channel> Connect(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

// Messages per second over all streams.
double Echo(const std::string& address, int streams, int window, double seconds) {
  const std::shared_ptr<grpc::Channel> channel = Connect(address);
  std::atomic<int64_t> messages = 0;
  const Clock::time_point begin = Clock::now();
  const Clock::time_point end =
      begin + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  std::vector<std::thread> threads;
  for (int i = 0; i < streams; ++i) {
    threads.emplace_back([&] {
      const auto stub = v1::Inference::NewStub(channel);
      grpc::ClientContext context;
      const auto stream = stub->StepStream(&context);
      v1::StepRequest request;
      v1::SequenceRequest* sequence = request.add_sequences();
      sequence->set_session_id("0123456789abcdef0123456789abcdef");
      sequence->mutable_input()->mutable_token_ids()->add_ids(65);
      v1::StepResponse response;
      for (int j = 0; j < window; ++j) stream->Write(request);
      while (stream->Read(&response)) {
        messages.fetch_add(1, std::memory_order_relaxed);
        if (Clock::now() >= end) break;
        stream->Write(request);
      }
      context.TryCancel();
      stream->Finish();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return 1000.0 * double(messages.load()) / Milliseconds(Clock::now() - begin);
}

// Milliseconds from the start of each call to its first token, `pause` after the one before.
std::vector<double> FirstTokens(v1::Inference::Stub& stub, int rounds,
                                std::chrono::milliseconds pause) {
  std::vector<double> times;
  v1::GenerateRequest request;
  request.mutable_input()->mutable_token_ids()->add_ids(65);
  request.set_max_new_tokens(1);
  for (int i = 0; i < rounds; ++i) {
    std::this_thread::sleep_for(pause);
    grpc::ClientContext context;
    const Clock::time_point begin = Clock::now();
    const auto reader = stub.Generate(&context, request);
    v1::GenerateResponse response;
    if (!reader->Read(&response)) {
      std::fprintf(stderr, "%s\n", reader->Finish().error_message().c_str());
      std::exit(1);
    }
    times.push_back(Milliseconds(Clock::now() - begin));
    while (reader->Read(&response)) {
    }
    reader->Finish();
  }
  return times;
}

void PrintFirstTokens(const char* name, const std::string& address, int idle_rounds) {
  const auto stub = v1::Inference::NewStub(Connect(address));
  FirstTokens(*stub, 20, std::chrono::milliseconds(1));  // Connects and warms up.
  const auto steady = FirstTokens(*stub, 300, std::chrono::milliseconds(5));
  const auto idle = FirstTokens(*stub, idle_rounds, std::chrono::milliseconds(3000));
  std::printf(
      "%-16s first token, ms: steady p50 %.2f p90 %.2f | after 3 s of silence p50 %.2f p90 %.2f "
      "max %.2f (%d rounds)\n",
      name, Quantile(steady, 0.5), Quantile(steady, 0.9), Quantile(idle, 0.5), Quantile(idle, 0.9),
      Quantile(idle, 1.0), idle_rounds);
  std::fflush(stdout);
}

int Main(int argc, char** argv) {
  double seconds = 1.0;
  int idle_rounds = 20;
  std::string address;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const std::string value = word.substr(std::min(word.size(), word.find('=') + 1));
    if (word.starts_with("--serve=")) RunServer(value);
    if (word.starts_with("--address=")) {
      address = value;
    } else if (word.starts_with("--seconds=")) {
      seconds = std::atof(value.c_str());
    } else if (word.starts_with("--idle-rounds=")) {
      idle_rounds = std::max(1, std::atoi(value.c_str()));
    } else {
      std::fprintf(stderr, "transport_bench [--address=H:P] [--seconds=S] [--idle-rounds=N]\n");
      return 2;
    }
  }
  if (!address.empty()) {
    PrintFirstTokens(address.c_str(), address, idle_rounds);
    return 0;
  }
  std::printf(
      "%u cores, %g s a cell; "
      "messages per second, and the server's CPU time for one, by streams x window\n",
      std::thread::hardware_concurrency(), seconds);
  for (const auto& [streams, window] :
       {std::pair{1, 1}, {1, 32}, {4, 1}, {4, 32}, {16, 1}, {16, 8}, {32, 1}}) {
    double rates[2] = {};
    double cpu_us[2] = {1e9, 1e9};
    // Alternating, best of three: whatever else the machine does hits both.
    for (int round = 0; round < 3; ++round) {
      for (int i = 0; i < 2; ++i) {
        const ServerProcess server(i == 0 ? "completion-queue" : "callback");
        const double cpu_before = server.CpuSeconds();
        const double rate = Echo(server.address(), streams, window, seconds);
        const double cpu = server.CpuSeconds() - cpu_before;
        rates[i] = std::max(rates[i], rate);
        cpu_us[i] = std::min(cpu_us[i], 1e6 * cpu / (rate * seconds));
      }
    }
    std::printf(
        "%2d x %-2d  completion queue %7.0f (%4.1f us)  callback %7.0f (%4.1f us)  ratio %.2f\n",
        streams, window, rates[0], cpu_us[0], rates[1], cpu_us[1], rates[0] / rates[1]);
    std::fflush(stdout);
  }
  for (const char* transport : {"completion-queue", "callback"}) {
    const ServerProcess server(transport);
    PrintFirstTokens(transport, server.address(), idle_rounds);
  }
  return 0;
}

}  // namespace
}  // namespace gdn::rpc

int main(int argc, char** argv) {
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  return gdn::rpc::Main(argc, argv);
}
