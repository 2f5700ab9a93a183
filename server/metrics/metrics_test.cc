#include "server/metrics/metrics.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace gdn::metrics {
namespace {

constexpr std::string_view kOps[] = {"matmul", "delta_rule"};
const ModelLabels kModel = {.name = "m",
                            .architecture = "a",
                            .fingerprint = "f",
                            .device = "cpu",
                            .precision = "bfloat16",
                            .state_type = "float32",
                            .state_bytes_per_slot = 1000,
                            .weight_bytes = 11,
                            .pool_bytes = 12,
                            .workspace_bytes = 13};

// The series of a page: text before the value -> value.
std::map<std::string, double> Parse(const std::string& page) {
  std::map<std::string, double> series;
  std::istringstream lines(page);
  for (std::string line; std::getline(lines, line);) {
    if (line.empty() || line[0] == '#') continue;
    const size_t space = line.rfind(' ');
    const bool fresh =
        series.emplace(line.substr(0, space), std::strtod(line.c_str() + space, nullptr)).second;
    EXPECT_TRUE(fresh) << "twice: " << line;
  }
  return series;
}

// Names of the families, of their TYPE lines.
std::set<std::string> FamilyNames(const std::string& page) {
  std::set<std::string> names;
  std::istringstream lines(page);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string hash, type, name;
    if (words >> hash >> type >> name && hash == "#" && type == "TYPE") names.insert(name);
  }
  return names;
}

// A connection to be closed, or -1.
int Connect(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  const timeval timeout = {.tv_sec = 10, .tv_usec = 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0) return fd;
  close(fd);
  return -1;
}

// One HTTP request; the whole answer.
std::string Get(int port, const std::string& path) {
  const int fd = Connect(port);
  std::string answer;
  if (fd >= 0) {
    const std::string request = "GET " + path + " HTTP/1.0\r\nHost: localhost\r\n\r\n";
    EXPECT_EQ(send(fd, request.data(), request.size(), 0), std::ssize(request));
    char buffer[4096];
    for (ssize_t n; (n = recv(fd, buffer, sizeof(buffer), 0)) > 0;) {
      answer.append(buffer, static_cast<size_t>(n));
    }
  }
  close(fd);
  return answer;
}

class MetricsTest : public testing::Test {
 protected:
  void SetUp() override { metrics_.SetModel(kModel, kOps); }

  double Value(const std::string& series) const {
    const auto all = Parse(metrics_.Text());
    const auto found = all.find(series);
    EXPECT_NE(found, all.end()) << series;
    return found == all.end() ? NAN : found->second;
  }

  Metrics metrics_{"1.2.3"};
};

TEST_F(MetricsTest, EverythingIsThereAndZeroBeforeAnythingHappens) {
  const auto series = Parse(metrics_.Text());
  const std::map<std::string, double> not_zero = {
      {"gdn_build_info{version=\"1.2.3\"}", 1},
      {"gdn_device_memory_bytes{use=\"weights\"}", 11},
      {"gdn_device_memory_bytes{use=\"states\"}", 12},
      {"gdn_device_memory_bytes{use=\"workspace\"}", 13}};
  for (const auto& [name, value] : series) {
    if (name.starts_with("process_") || name.starts_with("gdn_model_info")) continue;
    EXPECT_EQ(value, not_zero.contains(name) ? not_zero.at(name) : 0.0) << name;
  }
  for (const std::string_view rpc : rpc::kRpcNames) {
    for (const std::string_view code : rpc::kCodeNames) {
      EXPECT_TRUE(series.contains("gdn_requests_total{code=\"" + std::string(code) + "\",rpc=\"" +
                                  std::string(rpc) + "\"}"))
          << rpc << " " << code;
    }
    EXPECT_TRUE(
        series.contains("gdn_request_duration_seconds_count{rpc=\"" + std::string(rpc) + "\"}"));
  }
  for (const std::string_view op : kOps) {
    for (const std::string phase : {"prefill", "decode", "mixed"}) {
      EXPECT_TRUE(series.contains("gdn_kernel_duration_seconds_count{op=\"" + std::string(op) +
                                  "\",phase=\"" + phase + "\"}"));
    }
  }
}

// The CPU pipeline has 14 ops, the most; two more may come.
TEST(MetricsSizeTest, AServerHasAtMost1500Series) {
  Metrics metrics("1.2.3");
  std::vector<std::string> names;
  for (int i = 0; i < 16; ++i) names.push_back("op_" + std::to_string(i));
  const std::vector<std::string_view> ops(names.begin(), names.end());
  metrics.SetModel(kModel, ops);
  EXPECT_LE(Parse(metrics.Text()).size(), 1500u);
}

TEST_F(MetricsTest, ReadinessAndDrain) {
  metrics_.SetDrainTimeout(30);
  EXPECT_EQ(Value("gdn_ready"), 0);
  EXPECT_EQ(Value("gdn_drain_timeout_seconds"), 30);
  metrics_.SetReady();
  EXPECT_EQ(Value("gdn_ready"), 1);
  EXPECT_EQ(Value("gdn_drain_seconds"), 0);
  metrics_.BeginDrain();
  EXPECT_EQ(Value("gdn_ready"), 0);
  EXPECT_GT(Value("gdn_drain_seconds"), 0);
}

TEST_F(MetricsTest, StepsCountTokensRowsAndTime) {
  metrics_.OnStep({.phase = pipeline::Phase::kMixed,
                   .duration_ns = 3'000'000,
                   .prefill_tokens = 100,
                   .decode_tokens = 7,
                   .prefill_sequences = 2,
                   .decode_sequences = 7});
  metrics_.OnStep({.phase = pipeline::Phase::kDecode,
                   .duration_ns = 1'000'000,
                   .decode_tokens = 1,
                   .decode_sequences = 1});
  EXPECT_EQ(Value("gdn_tokens_total{phase=\"prefill\"}"), 100);
  EXPECT_EQ(Value("gdn_tokens_total{phase=\"decode\"}"), 8);
  EXPECT_EQ(Value("gdn_batch_size_count{phase=\"prefill\"}"), 1);
  EXPECT_EQ(Value("gdn_batch_size_sum{phase=\"prefill\"}"), 2);
  EXPECT_EQ(Value("gdn_batch_size_count{phase=\"decode\"}"), 2);
  EXPECT_EQ(Value("gdn_batch_size_bucket{phase=\"decode\",le=\"6\"}"), 1);
  EXPECT_EQ(Value("gdn_batch_size_bucket{phase=\"decode\",le=\"8\"}"), 2);
  EXPECT_DOUBLE_EQ(Value("gdn_step_duration_seconds_sum{phase=\"mixed\"}"), 0.003);
  EXPECT_DOUBLE_EQ(Value("gdn_step_duration_seconds_sum{phase=\"decode\"}"), 0.001);
  EXPECT_EQ(Value("gdn_step_duration_seconds_count{phase=\"prefill\"}"), 0);
}

TEST_F(MetricsTest, EachEventMovesItsOwnSeries) {
  const auto before = Parse(metrics_.Text());
  metrics_.OnQueueTime(2'000'000'000);
  metrics_.OnFirstToken(3'000'000'000);
  metrics_.OnInterToken(4'000'000'000);
  metrics_.OnStreamStarted();
  metrics_.OnStreamEnded(engine::StreamEnd::kFailed);
  metrics_.OnCallEnded(7'000'000'000, std::nullopt);
  metrics_.OnCallEnded(8'000'000'000, 500'000'000);
  metrics_.OnCancelled(engine::CancelPhase::kPrefill);
  metrics_.OnRejected(engine::RejectionReason::kNoSlot);
  metrics_.OnEvicted(engine::EvictionReason::kTtl);
  metrics_.OnNonFinite();
  metrics_.OnStepFailed();
  metrics_.OnStepFailed();
  metrics_.OnStreamBlocked(1'500'000'000);
  metrics_.OnKernel("delta_rule", pipeline::Phase::kDecode, 5'000'000'000);
  metrics_.OnKernel("not an op", pipeline::Phase::kDecode, 1);
  metrics_.OnDecodeStateBytes(4096);
  metrics_.OnGpuBusy(pipeline::Phase::kDecode, 2'000'000'000);
  metrics_.OnGraphReplay(true, 3);
  metrics_.OnGraphReplay(false, 0);
  metrics_.OnCallStarted(rpc::Rpc::kStep);
  metrics_.OnCallDone(rpc::Rpc::kStep, 5, 6'000'000'000);
  metrics_.OnCallDone(rpc::Rpc::kStep, 99, 0);
  std::map<std::string, double> moved;
  for (const auto& [name, value] : Parse(metrics_.Text())) {
    const bool bucket = name.find("_bucket") != std::string::npos;
    if (!bucket && !name.starts_with("process_") && value != before.at(name)) moved[name] = value;
  }
  const std::map<std::string, double> expected = {
      {"gdn_queue_duration_seconds_count", 1},
      {"gdn_queue_duration_seconds_sum", 2},
      {"gdn_time_to_first_token_seconds_count", 1},
      {"gdn_time_to_first_token_seconds_sum", 3},
      {"gdn_inter_token_latency_seconds_count", 1},
      {"gdn_inter_token_latency_seconds_sum", 4},
      {"gdn_streams_started_total", 1},
      {"gdn_streams_finished_total{reason=\"failed\"}", 1},
      {"gdn_call_duration_seconds_count", 2},
      {"gdn_call_duration_seconds_sum", 15},
      {"gdn_compute_duration_seconds_count", 1},
      {"gdn_compute_duration_seconds_sum", 0.5},
      {"gdn_decode_state_bytes_total", 4096},
      {"gdn_gpu_busy_seconds_total{phase=\"decode\"}", 2},
      {"gdn_graph_replays_total{result=\"hit\"}", 1},
      {"gdn_graph_replays_total{result=\"miss\"}", 1},
      {"gdn_batch_padding_rows_total", 3},
      {"gdn_requests_started_total{rpc=\"Step\"}", 1},
      {"gdn_cancellations_total{phase=\"prefill\"}", 1},
      {"gdn_rejections_total{reason=\"no_slot\"}", 1},
      {"gdn_session_evictions_total{reason=\"ttl\"}", 1},
      {"gdn_nonfinite_states_total", 1},
      {"gdn_step_failed_sessions_total", 2},
      {"gdn_stream_blocked_seconds_total", 1.5},
      {"gdn_kernel_duration_seconds_count{op=\"delta_rule\",phase=\"decode\"}", 1},
      {"gdn_kernel_duration_seconds_sum{op=\"delta_rule\",phase=\"decode\"}", 5},
      {"gdn_requests_total{code=\"NOT_FOUND\",rpc=\"Step\"}", 1},
      {"gdn_requests_total{code=\"UNKNOWN\",rpc=\"Step\"}", 1},
      {"gdn_request_duration_seconds_count{rpc=\"Step\"}", 2},
      {"gdn_request_duration_seconds_sum{rpc=\"Step\"}", 6},
  };
  EXPECT_EQ(moved, expected);
}

TEST_F(MetricsTest, LevelsAreGaugesAndFreshAtEachScrape) {
  engine::Levels levels = {.queued_calls = 1,
                           .queued_tokens = 2,
                           .running_streams = 3,
                           .blocked_streams = 4,
                           .live_sessions = 5,
                           .slots_free = 6,
                           .slots_live = 7,
                           .slots_in_flight = 8,
                           .slots_reserved = 1};
  metrics_.OnLevels(levels);
  EXPECT_EQ(Value("gdn_queue_depth"), 1);
  EXPECT_EQ(Value("gdn_queue_tokens"), 2);
  EXPECT_EQ(Value("gdn_running_streams"), 3);
  EXPECT_EQ(Value("gdn_blocked_streams"), 4);
  EXPECT_EQ(Value("gdn_sessions"), 5);
  EXPECT_EQ(Value("gdn_state_slots{state=\"free\"}"), 6);
  EXPECT_EQ(Value("gdn_state_slots{state=\"live\"}"), 7);
  EXPECT_EQ(Value("gdn_state_slots{state=\"in_flight\"}"), 8);
  EXPECT_EQ(Value("gdn_state_slots{state=\"reserved\"}"), 1);
  EXPECT_EQ(Value("gdn_state_bytes{state=\"free\"}"), 6'000);
  EXPECT_EQ(Value("gdn_state_bytes{state=\"live\"}"), 7'000);
  EXPECT_EQ(Value("gdn_state_bytes{state=\"in_flight\"}"), 8'000);
  EXPECT_EQ(Value("gdn_state_bytes{state=\"reserved\"}"), 1'000);
  metrics_.SetLevelsSource([] { return engine::Levels{.running_streams = 42}; });
  EXPECT_EQ(Value("gdn_running_streams"), 42);
  EXPECT_EQ(Value("gdn_queue_depth"), 0);
  metrics_.SetLevelsSource(nullptr);
  metrics_.OnLevels(levels);
  EXPECT_EQ(Value("gdn_running_streams"), 3);
}

TEST_F(MetricsTest, AClockThatGoesBackDoesNotSpoilSums) {
  metrics_.OnFirstToken(1'000'000'000);
  metrics_.OnFirstToken(-5'000'000'000);
  metrics_.OnStreamBlocked(-1);
  EXPECT_EQ(Value("gdn_time_to_first_token_seconds_sum"), 1);
  EXPECT_EQ(Value("gdn_time_to_first_token_seconds_count"), 2);
  EXPECT_EQ(Value("gdn_stream_blocked_seconds_total"), 0);
}

// Times that an operator would tell apart lie in different buckets: kernels up to a millisecond by
// factors of 2.5, tokens up to ten seconds by factors of 1.6.
TEST_F(MetricsTest, BucketsTellKernelsAndTokensApart) {
  const auto distinct = [this](const std::string& series, double from_ns, double to_ns,
                               double factor, const std::function<void(int64_t)>& observe) {
    std::set<std::map<std::string, double>> seen;
    size_t times = 0;
    for (double ns = from_ns; ns < to_ns; ns *= factor, ++times) {
      std::map<std::string, double> moved;
      const auto before = Parse(metrics_.Text());
      observe(static_cast<int64_t>(ns));
      for (const auto& [name, value] : Parse(metrics_.Text())) {
        if (name.starts_with(series)) moved[name] = value - before.at(name);
      }
      EXPECT_GT(moved.size(), 5u) << series;
      seen.insert(moved);
    }
    EXPECT_EQ(seen.size(), times) << series;
  };
  distinct("gdn_kernel_duration_seconds_bucket{op=\"matmul\",phase=\"decode\"", 900, 1e6, 2.5,
           [this](int64_t ns) { metrics_.OnKernel("matmul", pipeline::Phase::kDecode, ns); });
  distinct("gdn_inter_token_latency_seconds_bucket", 90e3, 10e9, 1.6,
           [this](int64_t ns) { metrics_.OnInterToken(ns); });
}

TEST_F(MetricsTest, BucketBoundsAreShortDecimals) {
  const std::string page = metrics_.Text();
  const std::string key = "le=\"";
  for (size_t at = page.find(key); at != std::string::npos; at = page.find(key, at + 1)) {
    const size_t begin = at + key.size();
    const std::string bound = page.substr(begin, page.find('"', begin) - begin);
    EXPECT_LE(bound.size(), 7u) << bound;
  }
}

TEST_F(MetricsTest, ProcessFamiliesAreSane) {
  EXPECT_GT(Value("process_resident_memory_bytes"), 1e6);
  EXPECT_GT(Value("process_cpu_seconds_total"), 0);
  EXPECT_GT(Value("process_open_fds"), 2);
  const double start = Value("process_start_time_seconds");
  const auto now = static_cast<double>(time(nullptr));
  EXPECT_GT(start, now - 86'400);
  EXPECT_LT(start, now + 2);
}

TEST_F(MetricsTest, ManyThreadsLoseNothing) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([this] {
      for (int j = 0; j < 10'000; ++j) {
        metrics_.OnInterToken(1000);
        metrics_.OnCallDone(rpc::Rpc::kGenerate, 0, 1000);
        metrics_.OnLevels({});
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(Value("gdn_inter_token_latency_seconds_count"), 40'000);
  EXPECT_EQ(Value("gdn_requests_total{code=\"OK\",rpc=\"Generate\"}"), 40'000);
}

TEST_F(MetricsTest, ATakenPortIsAStatus) {
  ASSERT_TRUE(metrics_.Listen("127.0.0.1:0").ok());
  ASSERT_GT(metrics_.port(), 0);
  Metrics second("2");
  const std::string address = "127.0.0.1:" + std::to_string(metrics_.port());
  const absl::Status status = second.Listen(address);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(status.message().find(address), absl::string_view::npos) << status;
  EXPECT_NE(status.message().find("--metrics-listen"), absl::string_view::npos) << status;
}

TEST_F(MetricsTest, SilentConnectionsDoNotKeepAScrapeWaiting) {
  ASSERT_TRUE(metrics_.Listen("127.0.0.1:0").ok());
  std::vector<int> silent(8);
  for (int& fd : silent) {
    fd = Connect(metrics_.port());
    ASSERT_GE(fd, 0);
  }
  EXPECT_TRUE(Get(metrics_.port(), "/metrics").starts_with("HTTP/1.1 200"));
  char byte = 0;
  for (const int fd : silent) {
    // Dropped, whether or not it is told so; not open until this end gives up.
    const ssize_t received = recv(fd, &byte, 1, 0);
    EXPECT_FALSE(received < 0 && errno == EAGAIN);
    close(fd);
  }
}

// docs/metrics.md has a table row `| \`name\` | ...` for each family, and no others.
TEST_F(MetricsTest, TheDocumentationListsExactlyWhatIsServed) {
  std::set<std::string> documented;
  std::ifstream file(GDN_SOURCE_DIR "/docs/metrics.md");
  ASSERT_TRUE(file) << "docs/metrics.md is missing";
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("| `")) continue;
    const size_t end = line.find_first_of("`{", 3);
    EXPECT_TRUE(documented.insert(line.substr(3, end - 3)).second) << "twice: " << line;
  }
  ASSERT_TRUE(metrics_.Listen("127.0.0.1:0").ok());
  Get(metrics_.port(), "/metrics");  // The exposer's own families appear with the first scrape.
  const std::string answer = Get(metrics_.port(), "/metrics");
  EXPECT_TRUE(answer.starts_with("HTTP/1.1 200")) << answer.substr(0, 100);
  const std::set<std::string> served = FamilyNames(answer);
  std::vector<std::string> difference;
  std::set_symmetric_difference(documented.begin(), documented.end(), served.begin(), served.end(),
                                std::back_inserter(difference));
  EXPECT_EQ(difference, std::vector<std::string>{});
  EXPECT_GT(served.size(), 25u);
}

}  // namespace
}  // namespace gdn::metrics
