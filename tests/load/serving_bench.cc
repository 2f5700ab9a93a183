// A running server under load: tokens per second, time to first token and gaps between messages of
// many Generate streams, from one thread on one completion queue. With --idle-probes it compares
// the first token of a lone call under steady load (a call every 100 ms) and after silence.
//
// usage: serving_bench --server HOST:PORT [--streams 32] [--tokens 256] [--rounds 3]
//                      [--idle-probes 20] [--silence-ms 3000]
#include <grpcpp/grpcpp.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "gdn/v1/inference.grpc.pb.h"

namespace gdn {
namespace {

using Clock = std::chrono::steady_clock;

double Ms(Clock::duration d) { return std::chrono::duration<double, std::milli>(d).count(); }

double Quantile(std::vector<double> values, double q) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[std::min(values.size() - 1,
                         static_cast<size_t>(q * static_cast<double>(values.size())))];
}

[[noreturn]] void Die(const std::string& message) {
  std::fprintf(stderr, "serving_bench: %s\n", message.c_str());
  std::exit(1);
}

// One Generate call; its address is the tag, since it has one operation in flight at a time.
struct Stream {
  grpc::ClientContext context;
  std::unique_ptr<grpc::ClientAsyncReader<v1::GenerateResponse>> reader;
  v1::GenerateResponse message;
  grpc::Status status;
  Clock::time_point start;
  Clock::time_point last;
  int64_t tokens = 0;
  bool finishing = false;
};

struct Result {
  double tokens_per_second = 0;
  std::vector<double> first_ms;
  std::vector<double> gap_ms;
  int64_t messages = 0;
};

class Load {
 public:
  explicit Load(const std::string& target)
      : stub_(v1::Inference::NewStub(
            grpc::CreateChannel(target, grpc::InsecureChannelCredentials()))) {}

  // Starts `streams` calls at once and reads them to their ends. The rate counts from the moment
  // every stream has its first token.
  Result Run(int streams, int tokens) {
    Result result;
    grpc::CompletionQueue queue;
    std::vector<std::unique_ptr<Stream>> all;
    for (int i = 0; i < streams; ++i) {
      v1::GenerateRequest request;
      for (const int id : {65 + i % 26, 110, 100, 32}) {
        request.mutable_input()->mutable_token_ids()->add_ids(id);
      }
      request.set_max_new_tokens(tokens);
      request.set_ignore_eos(true);
      auto stream = std::make_unique<Stream>();
      stream->context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(5));
      stream->start = Clock::now();
      stream->reader = stub_->AsyncGenerate(&stream->context, request, &queue, stream.get());
      all.push_back(std::move(stream));
    }
    int open = streams;
    int waiting = streams;
    int64_t counted = 0;
    Clock::time_point begin;
    Clock::time_point end;
    void* tag = nullptr;
    bool ok = false;
    while (open > 0 && queue.Next(&tag, &ok)) {
      auto* stream = static_cast<Stream*>(tag);
      if (stream->finishing) {
        if (!stream->status.ok()) Die(stream->status.error_message());
        --open;
        continue;
      }
      if (!ok) {
        stream->finishing = true;
        stream->reader->Finish(&stream->status, stream);
        continue;
      }
      const int64_t got = stream->message.tokens_size();
      if (got > 0) {
        const Clock::time_point now = Clock::now();
        ++result.messages;
        if (stream->tokens == 0) {
          result.first_ms.push_back(Ms(now - stream->start));
          if (--waiting == 0) begin = now;
        } else {
          result.gap_ms.push_back(Ms(now - stream->last));
          if (waiting == 0) counted += got;
        }
        stream->tokens += got;
        stream->last = now;
        end = now;
      }
      stream->reader->Read(&stream->message, stream);
    }
    for (const auto& stream : all) {
      if (stream->tokens != tokens) Die("a stream ended early");
    }
    queue.Shutdown();
    while (queue.Next(&tag, &ok)) {
    }
    result.tokens_per_second = 1e3 * static_cast<double>(counted) / Ms(end - begin);
    return result;
  }

 private:
  std::unique_ptr<v1::Inference::Stub> stub_;
};

int Main(const std::string& target, int streams, int tokens, int rounds, int idle_probes,
         int silence_ms) {
  Load load(target);
  load.Run(1, 8);
  double best = 0;
  for (int round = 0; round < rounds; ++round) {
    const Result result = load.Run(streams, tokens);
    best = std::max(best, result.tokens_per_second);
    std::printf(
        "%d streams: %.0f tokens/s, %.2f tokens a message, first token p50 %.1f p90 %.1f ms, gap "
        "p50 %.2f p90 %.2f p99 %.2f ms\n",
        streams, result.tokens_per_second,
        static_cast<double>(streams) * tokens / static_cast<double>(result.messages),
        Quantile(result.first_ms, .5), Quantile(result.first_ms, .9), Quantile(result.gap_ms, .5),
        Quantile(result.gap_ms, .9), Quantile(result.gap_ms, .99));
  }
  std::printf("best of %d: %.0f tokens/s\n", rounds, best);
  if (idle_probes <= 0) return 0;
  const auto probe = [&](int pause_ms, int count) {
    std::vector<double> first;
    for (int i = 0; i < count; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(pause_ms));
      first.push_back(load.Run(1, 1).first_ms[0]);
    }
    return first;
  };
  const std::vector<double> steady = probe(100, std::max(idle_probes, 50));
  const std::vector<double> idle = probe(silence_ms, idle_probes);
  std::printf("first token, a call every 100 ms: p50 %.2f p90 %.2f ms\n", Quantile(steady, .5),
              Quantile(steady, .9));
  std::printf("first token after %d ms of silence: p50 %.2f p90 %.2f ms\n", silence_ms,
              Quantile(idle, .5), Quantile(idle, .9));
  return 0;
}

}  // namespace
}  // namespace gdn

int main(int argc, char** argv) {
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  std::string target;
  int streams = 32;
  int tokens = 256;
  int rounds = 3;
  int idle_probes = 0;
  int silence_ms = 3000;
  CLI::App app("Load on a running gdn_server.");
  app.add_option("--server", target, "host:port")->required();
  app.add_option("--streams", streams);
  app.add_option("--tokens", tokens, "New tokens of each stream");
  app.add_option("--rounds", rounds);
  app.add_option("--idle-probes", idle_probes, "Lone calls after silence; 0: none");
  app.add_option("--silence-ms", silence_ms);
  CLI11_PARSE(app, argc, argv);
  return gdn::Main(target, streams, tokens, rounds, idle_probes, silence_ms);
}
