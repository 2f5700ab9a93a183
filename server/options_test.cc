#include "server/options.h"

#include <gtest/gtest.h>

#include <string>
#include <variant>
#include <vector>

namespace gdn {
namespace {

absl::StatusOr<std::variant<ServerOptions, InfoText>> Parse(std::vector<const char*> words) {
  words.insert(words.begin(), "gdn_server");
  return ParseOptions(static_cast<int>(words.size()), words.data());
}

ServerOptions Parsed(const std::vector<const char*>& words) {
  const auto result = Parse(words);
  EXPECT_TRUE(result.ok()) << result.status();
  return result.ok() ? std::get<ServerOptions>(*result) : ServerOptions();
}

// The message of the error that these words are.
std::string Refused(const std::vector<const char*>& words) {
  const auto result = Parse(words);
  EXPECT_FALSE(result.ok());
  if (result.ok()) return "";
  EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(result.status().message());
}

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(OptionsTest, DefaultsNeedOnlyAModel) {
  const ServerOptions options = Parsed({"--model", "m"});
  EXPECT_EQ(options.model.load.path, "m");
  EXPECT_FALSE(options.model.load.random_weights.has_value());
  EXPECT_FALSE(options.model.load.layers.has_value());
  EXPECT_EQ(options.device.precision, pipeline::Precision::kBFloat16);
  EXPECT_EQ(options.device.state_type, pipeline::StateType::kFloat32);
  EXPECT_EQ(options.engine.default_ttl_ms, 600'000);
  EXPECT_EQ(options.metrics.listen, "127.0.0.1:9090");
  EXPECT_GE(options.rpc.threads, 1);
  EXPECT_TRUE(Contains(Refused({}), "--model"));
}

TEST(OptionsTest, EveryFlagReachesItsField) {
  const ServerOptions options = Parsed({"--model=m",
                                        "--model-name=n",
                                        "--random-weights=7",
                                        "--layers=2:5",
                                        "--device=cpu",
                                        "--device-index=2",
                                        "--cpu-threads=3",
                                        "--precision=float32",
                                        "--batch-invariant",
                                        "--state-type=bfloat16",
                                        "--max-sessions=11",
                                        "--session-ttl-s=1.5",
                                        "--max-batch-rows=12",
                                        "--prefill-token-budget=640",
                                        "--prefill-chunk-tokens=64",
                                        "--max-queued-calls=14",
                                        "--stream-buffer-tokens=15",
                                        "--max-new-tokens=16",
                                        "--listen=0.0.0.0:17",
                                        "--port-file=p",
                                        "--rpc-threads=18",
                                        "--max-concurrent-streams=19",
                                        "--drain-timeout-s=20",
                                        "--metrics-listen=off",
                                        "--kernel-timing-interval=21",
                                        "--log-requests=all",
                                        "--log-prompts",
                                        "--log-format=json",
                                        "--log-level=warning"});
  EXPECT_EQ(options.model.name, "n");
  EXPECT_EQ(options.model.load.random_weights, 7u);
  ASSERT_TRUE(options.model.load.layers.has_value());
  EXPECT_EQ(options.model.load.layers->first, 2);
  EXPECT_EQ(options.model.load.layers->last, 5);
  EXPECT_EQ(options.device.device, Device::kCpu);
  EXPECT_EQ(options.device.index, 2);
  EXPECT_EQ(options.device.cpu_threads, 3);
  EXPECT_EQ(options.device.precision, pipeline::Precision::kFloat32);
  EXPECT_TRUE(options.device.batch_invariant);
  EXPECT_EQ(options.device.state_type, pipeline::StateType::kBFloat16);
  EXPECT_EQ(options.max_sessions, 11);
  EXPECT_EQ(options.engine.default_ttl_ms, 1500);
  EXPECT_EQ(options.engine.max_batch_rows, 12);
  EXPECT_EQ(options.engine.prefill_token_budget, 640);
  EXPECT_EQ(options.engine.prefill_chunk_tokens, 64);
  EXPECT_EQ(options.engine.max_queued_calls, 14);
  EXPECT_EQ(options.engine.stream_buffer_tokens, 15);
  EXPECT_EQ(options.engine.max_new_tokens, 16);
  EXPECT_EQ(options.rpc.listen, "0.0.0.0:17");
  EXPECT_EQ(options.port_file, "p");
  EXPECT_EQ(options.rpc.threads, 18);
  EXPECT_EQ(options.rpc.max_concurrent_streams, 19);
  EXPECT_EQ(options.drain_timeout_s, 20);
  EXPECT_EQ(options.metrics.listen, "");
  EXPECT_EQ(options.device.kernel_timing_interval, 21);
  EXPECT_EQ(options.rpc.log.which, rpc::LoggedRequests::kAll);
  EXPECT_TRUE(options.rpc.log.prompts);
  EXPECT_EQ(options.log.format, LogFormat::kJson);
  EXPECT_EQ(options.log.level, LogLevel::kWarning);
}

// The logged configuration says everything: parsing it gives the same configuration again.
TEST(OptionsTest, TheDescriptionIsComplete) {
  const std::vector<std::vector<const char*>> commands = {
      {"--model=m"},
      {"--model=m", "--model-name=n", "--random-weights", "--layers=0:1", "--batch-invariant",
       "--port-file=p", "--metrics-listen=off", "--session-ttl-s=0", "--cpu-threads=2"}};
  for (const auto& command : commands) {
    const std::vector<std::string> words = DescribeOptions(Parsed(command));
    std::vector<const char*> again;
    for (const std::string& word : words) again.push_back(word.c_str());
    EXPECT_EQ(DescribeOptions(Parsed(again)), words);
    for (const char* word : command) {
      const std::string flag = std::string(word).substr(0, std::string(word).find('='));
      bool found = false;
      for (const std::string& described : words) found |= described.starts_with(flag);
      EXPECT_TRUE(found) << flag;
    }
  }
}

TEST(OptionsTest, RandomWeightsHasADefaultSeed) {
  EXPECT_EQ(Parsed({"--model=m", "--random-weights"}).model.load.random_weights, 0u);
  EXPECT_EQ(Parsed({"--random-weights", "--model=m"}).model.load.random_weights, 0u);
  EXPECT_TRUE(Contains(Refused({"--model=m", "--random-weights=x"}), "--random-weights=x"));
  EXPECT_TRUE(Contains(Refused({"--model=m", "--random-weights=-1"}), "--random-weights=-1"));
}

TEST(OptionsTest, BadValuesAreNamed) {
  const struct {
    const char* word;
    const char* flag;
  } cases[] = {
      {"--cpu-threads=-1", "--cpu-threads"},
      {"--cpu-threads=two", "--cpu-threads"},
      {"--precision=float16", "--precision"},
      {"--state-type=int8", "--state-type"},
      {"--max-sessions=-1", "--max-sessions"},
      {"--session-ttl-s=-1", "--session-ttl-s"},
      {"--session-ttl-s=nan", "--session-ttl-s"},
      {"--prefill-token-budget=0", "--prefill-token-budget"},
      {"--max-queued-calls=0", "--max-queued-calls"},
      {"--stream-buffer-tokens=0", "--stream-buffer-tokens"},
      {"--max-new-tokens=0", "--max-new-tokens"},
      {"--listen=localhost", "--listen=localhost"},
      {"--listen=:1", "--listen=:1"},
      {"--listen=h:70000", "--listen=h:70000"},
      {"--rpc-threads=0", "--rpc-threads"},
      {"--drain-timeout-s=-1", "--drain-timeout-s"},
      {"--metrics-listen=9090", "--metrics-listen=9090"},
      {"--kernel-timing-interval=-1", "--kernel-timing-interval"},
      {"--log-requests=some", "--log-requests"},
      {"--log-format=xml", "--log-format"},
      {"--log-level=loud", "--log-level"},
      {"--model-name=caf\xE9", "--model-name=caf\\xe9"},
      {"--layers=3", "--layers=3"},
      {"--layers=3:3", "--layers=3:3"},
      {"--layers=4:3", "--layers=4:3"},
      {"--layers=-1:3", "--layers=-1:3"},
      {"--layers=a:b", "--layers=a:b"},
      {"--no-such-flag", "--no-such-flag"},
      {"stray", "stray"},
  };
  for (const auto& [word, flag] : cases) {
    const std::string message = Refused({"--model=m", word});
    EXPECT_TRUE(Contains(message, flag)) << word << ": " << message;
  }
}

TEST(OptionsTest, Devices) {
  EXPECT_EQ(Parsed({"--model=m"}).device.device, Device::kAuto);
  EXPECT_EQ(Parsed({"--model=m", "--device=cuda"}).device.device, Device::kCuda);
  const std::string message = Refused({"--model=m", "--device=cuda", "--precision=float32"});
  EXPECT_TRUE(Contains(message, "--device=cuda")) << message;
  EXPECT_TRUE(Contains(message, "--precision=float32")) << message;
  EXPECT_TRUE(Contains(Refused({"--model=m", "--device=tpu"}), "--device=tpu"));
}

TEST(OptionsTest, ConflictsNameBothFlags) {
  std::string message = Refused({"--model=m", "--listen=0.0.0.0:9090"});
  EXPECT_TRUE(Contains(message, "--listen=0.0.0.0:9090")) << message;
  EXPECT_TRUE(Contains(message, "--metrics-listen=127.0.0.1:9090")) << message;
  // Two free ports are two ports.
  Parsed({"--model=m", "--listen=127.0.0.1:0", "--metrics-listen=127.0.0.1:0"});

  message = Refused({"--model=m", "--prefill-token-budget=100", "--prefill-chunk-tokens=101"});
  EXPECT_TRUE(Contains(message, "--prefill-token-budget=100")) << message;
  EXPECT_TRUE(Contains(message, "--prefill-chunk-tokens=101")) << message;
}

TEST(OptionsTest, HelpGroupsEveryFlag) {
  const auto result = Parse({"--help"});
  ASSERT_TRUE(result.ok());
  const std::string& help = std::get<InfoText>(*result).text;
  size_t position = 0;
  for (const char* group : {"Model:", "Device:", "Engine:", "Server:", "Metrics:", "Logging:"}) {
    const size_t found = help.find(std::string("\n") + group);
    ASSERT_NE(found, std::string::npos) << group;
    EXPECT_GT(found, position) << group;
    position = found;
  }
  for (const std::string& word : DescribeOptions(Parsed(
           {"--model=m", "--model-name=n", "--random-weights", "--layers=0:1", "--port-file=p"}))) {
    const std::string flag = word.substr(0, word.find('='));
    EXPECT_TRUE(Contains(help, flag + " ")) << flag;
  }
}

TEST(OptionsTest, VersionIsTheProjects) {
  const auto result = Parse({"--version"});
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(std::get<InfoText>(*result).text, "gdn_server " GDN_VERSION "\n");
}

}  // namespace
}  // namespace gdn
