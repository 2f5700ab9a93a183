// gdnctl as a process against a fake server: what it sends, prints and returns.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "client/cpp/testing/fake_server.h"
#include "client/cpp/testing/process.h"

namespace gdn::client::testing {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

class GdnctlTest : public ::testing::Test {
 protected:
  struct Result {
    int exit_code = -1;
    std::string out;
    std::string err;
  };

  Control& control() { return server_.control(); }

  std::unique_ptr<Process> Start(std::vector<std::string> arguments, const std::string& input = "",
                                 Process::Stdout out = Process::Stdout::kPipe) {
    arguments.insert(arguments.begin(), GDNCTL_PATH);
    return std::make_unique<Process>(
        arguments, input, std::vector<std::string>{"GDN_SERVER=" + server_.address()}, out);
  }

  Result Run(const std::vector<std::string>& arguments, const std::string& input = "",
             Process::Stdout out = Process::Stdout::kPipe) {
    const auto process = Start(arguments, input, out);
    Result result;
    result.exit_code = process->Wait();
    result.out = process->out();
    result.err = process->err();
    return result;
  }

  std::string NewSession() {
    const Result result = Run({"session", "create"});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return result.out.substr(0, result.out.find('\n'));
  }

  std::string Path(const std::string& name) { return ::testing::TempDir() + "/gdnctl_" + name; }

  FakeServer server_;
};

std::vector<json> Lines(const std::string& text) {
  std::vector<json> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(json::parse(line));
  return lines;
}

std::string Floats(const std::vector<float>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
}

TEST_F(GdnctlTest, AnErrorIsTheOnlyThingOnStandardError) {
  const Result result = Run({"session", "get", "\xff"});  // Not UTF-8.
  EXPECT_NE(result.exit_code, 0);
  EXPECT_THAT(result.err, ::testing::StartsWith("gdnctl: cannot show session"));
}

TEST_F(GdnctlTest, VersionIsTheProjects) {
  const Result version = Run({"--version"});
  EXPECT_EQ(version.exit_code, 0);
  EXPECT_EQ(version.out, "gdnctl " GDN_VERSION "\n");
  EXPECT_EQ(version.err, "");
}

TEST_F(GdnctlTest, HelpNamesEveryCommandAndExitCode) {
  const Result help = Run({"--help"});
  EXPECT_EQ(help.exit_code, 0);
  for (const char* word : {"model", "generate", "session", "prefill", "step", "--server",
                           "GDN_SERVER", "--timeout", "--json", "Exit codes", "130"}) {
    EXPECT_THAT(help.out, HasSubstr(word));
  }
  EXPECT_EQ(Run({"generate", "--help"}).exit_code, 0);
}

TEST_F(GdnctlTest, WrongUsageIsOne) {
  for (const std::vector<std::string>& arguments : std::vector<std::vector<std::string>>{
           {},
           {"no-such-command"},
           {"generate"},
           {"generate", "text", "--ids", "1"},
           {"generate", "--no-such-flag", "text"},
           {"generate", "--ids", "1,x,3"},
           {"generate", "--stop", "a", "text"},
           {"generate", "--file", "/no/such/file"},
           {"generate", "--top-k", "many", "text"},
           {"session"},
           {"session", "get"},
           {"step", "text"},
           {"--timeout", "-1", "model"},
           {"prefill", "--session", "s", "--logits", "some", "text"}}) {
    const Result result = Run(arguments);
    EXPECT_EQ(result.exit_code, 1) << ::testing::PrintToString(arguments);
    EXPECT_NE(result.err, "") << ::testing::PrintToString(arguments);
    EXPECT_EQ(result.out, "") << ::testing::PrintToString(arguments);
  }
  EXPECT_THAT(Run({"generate", "--ids", "1,x,3"}).err,
              AllOf(HasSubstr("item 1"), HasSubstr("'x'")));
  EXPECT_TRUE(control().generate_requests.empty());
}

TEST_F(GdnctlTest, Model) {
  const Result human = Run({"model"});
  EXPECT_EQ(human.exit_code, 0) << human.err;
  EXPECT_THAT(human.out, AllOf(HasSubstr("fake"), HasSubstr("260, ids 0..255 are bytes")));
  const Result machine = Run({"--json", "model"});
  const std::vector<json> lines = Lines(machine.out);
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_EQ(lines[0]["vocab_size"], 260);
  EXPECT_EQ(lines[0]["eos_token_ids"], json({257}));
  EXPECT_EQ(lines[0]["limits"]["max_new_tokens"], 1000);
  EXPECT_FALSE(lines[0].contains("bos_token_id"));
}

TEST_F(GdnctlTest, GenerateWritesTheBytesAndNothingElse) {
  control().reply = std::string("caf\xC3\xA9 \xFF\x1b[0m\0end", 15);
  const Result result = Run({"generate", "And God said"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.out, control().reply);
  EXPECT_EQ(result.err, "");
  ASSERT_EQ(control().generate_requests.size(), 1u);
  const v1::GenerateRequest& request = control().generate_requests[0];
  EXPECT_EQ(request.input().token_ids().ids_size(), 12);
  EXPECT_EQ(request.input().token_ids().ids(0), 'A');
  // Defaults are the server's.
  EXPECT_FALSE(request.has_max_new_tokens());
  EXPECT_FALSE(request.sampling().has_temperature());
  EXPECT_FALSE(request.has_expected_position());
}

TEST_F(GdnctlTest, GenerateOnATerminal) {
  control().reply = "\xC3\xA9\xE2\x82\xAC \xFF\x1b[0m\xE2\x82";
  const Result result = Run({"generate", "x"}, "", Process::Stdout::kTerminal);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.out, "\xC3\xA9\xE2\x82\xAC \xEF\xBF\xBD\\x1b[0m\xEF\xBF\xBD\n");
}

TEST_F(GdnctlTest, IncompleteCharactersAreHeldBack) {
  control().reply = "a\xE2\x82\xAC";
  control().tokens_per_message = 3;  // What follows the 'a' has arrived when it is shown.
  control().hold_after = 3;
  const auto process = Start({"generate", "x"}, "", Process::Stdout::kTerminal);
  ASSERT_TRUE(process->WaitForOutput("a"));
  process->Signal(SIGINT);
  EXPECT_EQ(process->Wait(), 130);
  EXPECT_EQ(process->out(), "a\xEF\xBF\xBD\n");
}

TEST_F(GdnctlTest, PromptFromEverySource) {
  const std::string path = Path("prompt.txt");
  std::ofstream(path) << "from file\n";
  EXPECT_EQ(Run({"generate", "--file", path}).exit_code, 0);
  EXPECT_EQ(Run({"generate", "-"}, std::string("in\0put", 6)).exit_code, 0);
  EXPECT_EQ(Run({"generate", "--file", "-"}, "input").exit_code, 0);
  EXPECT_EQ(Run({"generate", "--ids", "1, 2,300"}).exit_code, 0);
  std::vector<int> lengths;
  for (const v1::GenerateRequest& request : control().generate_requests) {
    lengths.push_back(request.input().token_ids().ids_size());
  }
  EXPECT_THAT(lengths, ElementsAre(10, 6, 5, 3));
  EXPECT_THAT(control().generate_requests.back().input().token_ids().ids(), ElementsAre(1, 2, 300));
}

TEST_F(GdnctlTest, EveryFlagOfGenerateArrives) {
  const Result result = Run({"generate",
                             "text",
                             "--temperature",
                             "0.5",
                             "--top-k",
                             "7",
                             "--top-p",
                             "0.25",
                             "--min-p",
                             "0.125",
                             "--repetition-penalty",
                             "1.5",
                             "--seed",
                             "18446744073709551615",
                             "--max-new-tokens",
                             "4",
                             "--stop",
                             "10,46",
                             "--ignore-eos",
                             "--session",
                             "s9",
                             "--expected-position",
                             "12",
                             "--top-logprobs",
                             "2"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  ASSERT_EQ(control().generate_requests.size(), 1u);
  const v1::GenerateRequest& request = control().generate_requests[0];
  EXPECT_EQ(request.sampling().temperature(), 0.5f);
  EXPECT_EQ(request.sampling().top_k(), 7);
  EXPECT_EQ(request.sampling().top_p(), 0.25f);
  EXPECT_EQ(request.sampling().min_p(), 0.125f);
  EXPECT_EQ(request.sampling().repetition_penalty(), 1.5f);
  EXPECT_EQ(request.sampling().seed(), 18446744073709551615u);
  EXPECT_EQ(request.max_new_tokens(), 4);
  EXPECT_THAT(request.stop_token_ids(), ElementsAre(10, 46));
  EXPECT_TRUE(request.ignore_eos());
  EXPECT_EQ(request.session_id(), "s9");
  EXPECT_EQ(request.expected_position(), 12);
  EXPECT_EQ(request.top_logprobs(), 2);
  EXPECT_EQ(result.out,
            "71 'G' -0.5000  |  71 'G' -0.5000, 72 'H' -1.5000\n"
            "111 'o' -0.5000  |  111 'o' -0.5000, 112 'p' -1.5000\n"
            "32 ' ' -0.5000  |  32 ' ' -0.5000, 33 '!' -1.5000\n"
            "105 'i' -0.5000  |  105 'i' -0.5000, 106 'j' -1.5000\n");
}

TEST_F(GdnctlTest, NegativeValuesReachTheServerToBeRefused) {
  control().failures.assign(
      1, {grpc::StatusCode::INVALID_ARGUMENT, "sampling.temperature: -1 is negative"});
  const Result result = Run({"generate", "text", "--temperature", "-1"});
  EXPECT_EQ(result.exit_code, 4);
  EXPECT_THAT(result.err, HasSubstr("sampling.temperature: -1 is negative"));
  EXPECT_EQ(control().generate_requests[0].sampling().temperature(), -1.0f);
}

TEST_F(GdnctlTest, GenerateAsJson) {
  control().reply = "a\xE2\x82\xAC\xFF";
  const Result result = Run({"generate", "--json", "--top-logprobs", "1", "text"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  const std::vector<json> lines = Lines(result.out);
  ASSERT_EQ(lines.size(), 5u);
  EXPECT_EQ(lines[0]["tokens"][0]["id"], 'a');
  EXPECT_EQ(lines[0]["tokens"][0]["logprob"], -0.5);
  EXPECT_EQ(lines[0]["tokens"][0]["top_logprobs"][0]["id"], 'a');
  EXPECT_EQ(lines[0]["seed"], "18446744073709551615");
  EXPECT_FALSE(lines[1].contains("seed"));
  std::vector<std::string> texts;
  for (const json& line : lines) texts.push_back(line["text"]);
  EXPECT_THAT(texts, ElementsAre("a", "", "", "\xE2\x82\xAC", "\xEF\xBF\xBD"));
  EXPECT_FALSE(lines[3].contains("finish_reason"));
  EXPECT_EQ(lines[4]["finish_reason"], "stop");
  EXPECT_EQ(lines[4]["usage"]["output_tokens"], 5);
  EXPECT_EQ(lines[4]["position"], 9);
}

TEST_F(GdnctlTest, WithoutByteVocabularyTextIsIds) {
  control().model.set_byte_vocabulary(false);
  const Result ids = Run({"generate", "--ids", "5"});
  EXPECT_EQ(ids.exit_code, 0) << ids.err;
  EXPECT_EQ(ids.out, "71 111 32 105 110 32 112 101 97 99 101 46\n");
  const Result refused = Run({"generate", "text"});
  EXPECT_EQ(refused.exit_code, 1);
  EXPECT_THAT(refused.err, AllOf(HasSubstr("byte vocabulary"), HasSubstr("--ids")));
  EXPECT_FALSE(Lines(Run({"generate", "--json", "--ids", "5"}).out)[0].contains("text"));
}

TEST_F(GdnctlTest, IdsAndStatsOnRequest) {
  const Result result =
      Run({"generate", "--output-ids", "--stats", "--max-new-tokens", "3", "text"});
  EXPECT_EQ(result.out, "71 111 32\n");
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("3 tokens"), HasSubstr("first token after"), HasSubstr("tokens/s")));
  const Result machine = Run({"generate", "--json", "--stats", "text"});
  const std::vector<json> stats = Lines(machine.err);
  ASSERT_EQ(stats.size(), 1u);
  EXPECT_EQ(stats[0]["stats"]["tokens"], 12);
  EXPECT_GT(stats[0]["stats"]["time_to_first_token_s"], 0.0);
}

TEST_F(GdnctlTest, CtrlCCancelsTheStream) {
  control().hold_after = 2;
  const auto process = Start({"generate", "text"});
  ASSERT_TRUE(process->WaitForOutput("Go"));
  process->Signal(SIGINT);
  EXPECT_EQ(process->Wait(), 130);
  EXPECT_EQ(process->out(), "Go");
  EXPECT_THAT(process->err(), HasSubstr("interrupted"));
  EXPECT_TRUE(control().WaitForCancelled(1));
}

TEST_F(GdnctlTest, AReaderThatLeavesEndsTheStream) {
  control().reply = std::string(100'000, 'x');
  const auto process = Start({"generate", "text", "--max-new-tokens", "100000"});
  ASSERT_TRUE(process->WaitForOutput("xx"));
  process->CloseOutput();
  EXPECT_THAT(process->Wait(), AnyOf(128 + SIGPIPE, 1));  // 1 where SIGPIPE is ignored.
}

TEST_F(GdnctlTest, SessionCommands) {
  const std::string id = NewSession();
  EXPECT_EQ(id, "s1");
  EXPECT_EQ(Run({"session", "create", "--ttl-ms", "5000"}).out, "s2\n");
  EXPECT_EQ(control().create_requests[1].ttl_ms(), 5000);
  EXPECT_EQ(Run({"prefill", "--session", id, "abc"}).exit_code, 0);

  const Result forked = Run({"session", "fork", id, "--count", "2", "--expected-position", "3"});
  EXPECT_EQ(forked.out, "s3\ns4\n") << forked.err;

  const Result list = Run({"session", "list"});
  for (const char* word : {"SESSION", "s1", "s2", "s3", "s4"}) {
    EXPECT_THAT(list.out, HasSubstr(word));
  }
  const std::vector<json> sessions = Lines(Run({"session", "list", "--json"}).out);
  ASSERT_EQ(sessions.size(), 4u);
  EXPECT_EQ(sessions[3]["session_id"], "s4");
  EXPECT_EQ(sessions[3]["position"], 3);
  EXPECT_EQ(sessions[3]["parent_session_id"], "s1");
  EXPECT_EQ(sessions[3]["token_hash"], "fedcba9876543210");

  const Result get = Run({"session", "get", "s4"});
  EXPECT_THAT(get.out, AllOf(HasSubstr("position   3"), HasSubstr("forked of  s1"),
                             HasSubstr("2001-09-09T01:46:40Z")));
  EXPECT_EQ(Run({"session", "delete", "s4", "s2"}).out,
            "deleted s4 at position 3\ndeleted s2 at position 0\n");
  const Result again = Run({"session", "delete", "s4", "s3"});
  EXPECT_EQ(again.exit_code, 3);
  EXPECT_THAT(again.err, AllOf(HasSubstr("s4"), HasSubstr("gdnctl session list")));
  EXPECT_EQ(again.out, "deleted s3 at position 3\n");
}

TEST_F(GdnctlTest, PositionMismatchSaysWhereTheSessionIs) {
  const std::string id = NewSession();
  ASSERT_EQ(Run({"prefill", "--session", id, "abc"}).exit_code, 0);
  const Result human = Run({"session", "fork", id, "--expected-position", "1"});
  EXPECT_EQ(human.exit_code, 3);
  EXPECT_THAT(human.err, HasSubstr("--expected-position 3"));
  const Result machine = Run({"session", "fork", id, "--expected-position", "1", "--json"});
  const json error = Lines(machine.err).at(0)["error"];
  EXPECT_EQ(error["code"], "FAILED_PRECONDITION");
  EXPECT_EQ(error["exit_code"], 3);
  EXPECT_EQ(error["expected_position"], 1);
  EXPECT_EQ(error["actual_position"], 3);
  EXPECT_EQ(error["session_id"], id);
}

TEST_F(GdnctlTest, PrefillAndStep) {
  const std::string id = NewSession();
  const Result prefill =
      Run({"prefill", "--session", id, "abc", "--next-token", "--logits", "last"});
  EXPECT_EQ(prefill.exit_code, 0) << prefill.err;
  EXPECT_THAT(prefill.out, AllOf(HasSubstr("position  3"), HasSubstr("100 'd'  -0.2500"),
                                 HasSubstr("[1, 3]  min -2.0000  max 1.5000"),
                                 HasSubstr("queue 1.000 ms  compute 2.000 ms  total 3.500 ms")));
  EXPECT_EQ(control().prefill_requests[0].sequences(0).output().logits(), v1::POSITIONS_LAST);

  const Result step =
      Run({"step", "--session", id, "--ids", "7", "--expected-position", "3", "--top-logprobs", "4",
           "--temperature", "0.5", "--logits", "all", "--json"});
  EXPECT_EQ(step.exit_code, 0) << step.err;
  const v1::SequenceRequest& request = control().step_requests.at(0).sequences(0);
  EXPECT_EQ(request.expected_position(), 3);
  EXPECT_TRUE(request.output().next_token());
  EXPECT_EQ(request.output().top_logprobs(), 4);
  EXPECT_EQ(request.output().sampling().temperature(), 0.5f);
  EXPECT_EQ(request.output().logits(), v1::POSITIONS_ALL);
  EXPECT_EQ(request.output().hidden_states(), v1::POSITIONS_NONE);
  const json line = Lines(step.out).at(0);
  EXPECT_EQ(line["position"], 4);
  EXPECT_EQ(line["next_token"]["id"], 8);
  EXPECT_EQ(line["logits"]["data"], json({1.5, -2.0, 0.25}));
  EXPECT_EQ(line["timings"]["total_ns"], 3'500'000);
}

TEST_F(GdnctlTest, HiddenStatesInAndOut) {
  const std::string id = NewSession();
  const std::string in = Path("in.f32");
  const std::string out = Path("out.f32");
  std::ofstream(in, std::ios::binary) << Floats({1, 2, 3, 4, -5, 6, 7, 8});
  const Result result =
      Run({"prefill", "--session", id, "--hidden", in, "--shape", "2,4", "--save-hidden", out});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(control().prefill_requests[0].sequences(0).input().hidden_states().shape(),
              ElementsAre(2, 4));
  std::ifstream file(out, std::ios::binary);
  std::ostringstream content;
  content << file.rdbuf();
  EXPECT_EQ(content.str(), Floats({2, 4, 6, 8, -10, 12, 14, 16}));
  EXPECT_THAT(result.out, HasSubstr("[2, 4]  min -10.0000"));

  EXPECT_EQ(Run({"step", "--session", id, "--hidden", in}).exit_code, 0);  // [2, 4] by its size.
  const Result wrong = Run({"step", "--session", id, "--hidden", in, "--shape", "3,4"});
  EXPECT_EQ(wrong.exit_code, 1);
  EXPECT_THAT(wrong.err, AllOf(HasSubstr("32 bytes"), HasSubstr("[3, 4]")));
  EXPECT_EQ(Run({"step", "--session", id, "--shape", "1,4", "x"}).exit_code, 1);
}

TEST_F(GdnctlTest, FaultOfTheSequenceIsAFailure) {
  google::rpc::Status status;
  status.set_code(grpc::StatusCode::DATA_LOSS);
  status.set_message("the state became non-finite");
  control().sequence_fault =
      grpc::Status(grpc::StatusCode::DATA_LOSS, "", status.SerializeAsString());
  const Result result = Run({"step", "--session", "s1", "x"});
  EXPECT_EQ(result.exit_code, 6);
  EXPECT_THAT(result.err, AllOf(HasSubstr("non-finite"), HasSubstr("DATA_LOSS")));
  EXPECT_EQ(result.out, "");
}

TEST_F(GdnctlTest, ExitCodeOfEveryStatus) {
  using enum grpc::StatusCode;
  const std::vector<std::pair<grpc::StatusCode, int>> cases = {
      {CANCELLED, 6},          {UNKNOWN, 6},
      {INVALID_ARGUMENT, 4},   {DEADLINE_EXCEEDED, 2},
      {NOT_FOUND, 3},          {ALREADY_EXISTS, 3},
      {PERMISSION_DENIED, 4},  {UNAUTHENTICATED, 4},
      {RESOURCE_EXHAUSTED, 5}, {ABORTED, 3},
      {OUT_OF_RANGE, 4},       {UNIMPLEMENTED, 4},
      {INTERNAL, 6},           {UNAVAILABLE, 2},
      {DATA_LOSS, 6},          {FAILED_PRECONDITION, 3}};
  for (const auto& [code, exit_code] : cases) {
    control().failures.assign(1, {code, "because of the test"});
    const Result result = Run({"generate", "text"});
    EXPECT_EQ(result.exit_code, exit_code) << code;
    EXPECT_THAT(result.err, AllOf(HasSubstr("cannot generate"), HasSubstr("because of the test")));
    EXPECT_EQ(result.out, "") << code;
  }
}

TEST_F(GdnctlTest, ExhaustedSaysWhenToRetry) {
  control().failures.assign(2, ExhaustedStatus("no free slot", 100));
  EXPECT_THAT(Run({"session", "create"}).err, HasSubstr("100 ms"));
  const Result machine = Run({"session", "create", "--json"});
  EXPECT_EQ(machine.exit_code, 5);
  EXPECT_EQ(Lines(machine.err).at(0)["error"]["retry_delay_ms"], 100);
}

TEST_F(GdnctlTest, TimeoutAndAbsentServer) {
  control().hold_after = 1;
  const Result late = Run({"--timeout", "1", "generate", "text"});
  EXPECT_EQ(late.exit_code, 2);
  EXPECT_EQ(late.out, "G");
  EXPECT_THAT(late.err, HasSubstr("--timeout"));

  std::string address;
  {
    FakeServer gone;
    address = gone.address();
  }
  const Result absent = Run({"--server", address, "--connect-timeout", "0.1", "model"});
  EXPECT_EQ(absent.exit_code, 2);
  EXPECT_THAT(absent.err,
              AllOf(HasSubstr(address), HasSubstr("--server"), Not(HasSubstr("GOAWAY"))));
}

}  // namespace
}  // namespace gdn::client::testing
