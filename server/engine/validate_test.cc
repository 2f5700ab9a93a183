#include "server/engine/validate.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

namespace gdn::engine {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();
using Code = absl::StatusCode;

pipeline::PipelineInfo Info() {
  pipeline::PipelineInfo info;
  info.vocab_size = 100;
  info.hidden_size = 4;
  info.num_slots = 8;
  info.has_embedding = true;
  info.has_head = true;
  return info;
}

// The status has the code, and its message each of the parts.
void ExpectError(const absl::Status& status, Code code, std::vector<std::string> parts) {
  EXPECT_EQ(status.code(), code) << status;
  for (const std::string& part : parts) {
    EXPECT_NE(std::string(status.message()).find(part), std::string::npos)
        << "\"" << part << "\" is not in: " << status;
  }
}

class ValidateTest : public ::testing::Test {
 protected:
  ValidateTest() {
    for (const char* id : {"a", "b"}) {
      SequenceRequest& sequence = batch_.sequences.emplace_back();
      sequence.session_id = id;
      sequence.input.tokens = {1, 2, 3};
    }
    generate_.input.tokens = {1, 2};
  }
  absl::Status Batch() const { return ValidateBatch(batch_, options_, info_); }
  absl::Status Generate() const { return ValidateGenerate(generate_, options_, info_); }

  EngineOptions options_;
  pipeline::PipelineInfo info_ = Info();
  BatchRequest batch_;
  GenerateRequest generate_;
};

TEST_F(ValidateTest, AcceptsGoodRequests) {
  EXPECT_TRUE(Batch().ok()) << Batch();
  EXPECT_TRUE(Generate().ok()) << Generate();
  batch_.sequences[0].input.tokens.clear();  // Empty input in Prefill.
  EXPECT_TRUE(Batch().ok()) << Batch();
}

TEST_F(ValidateTest, BatchShape) {
  BatchRequest empty;
  ExpectError(ValidateBatch(empty, options_, info_), Code::kInvalidArgument, {"sequences", "256"});
  batch_.sequences[1].session_id = "a";
  ExpectError(Batch(), Code::kInvalidArgument, {"sequences[1].session_id", "sequences[0]"});
  options_.max_batch_sequences = 1;
  ExpectError(Batch(), Code::kOutOfRange, {"sequences has 2", "limit of 1"});
}

TEST_F(ValidateTest, TokenIds) {
  for (const int32_t bad : {-1, 100, std::numeric_limits<int32_t>::min()}) {
    batch_.sequences[1].input.tokens = {99, 0, bad};
    ExpectError(Batch(), Code::kInvalidArgument,
                {"sequences[1].input.token_ids[2]", std::to_string(bad), "[0, 100)"});
    generate_.input.tokens = {5, bad};
    ExpectError(Generate(), Code::kInvalidArgument, {"input.token_ids[1]", std::to_string(bad)});
  }
}

TEST_F(ValidateTest, HiddenStates) {
  Input& input = batch_.sequences[1].input;
  input.tokens.clear();
  input.is_hidden = true;
  input.hidden.assign(12, 0.5f);
  EXPECT_TRUE(Batch().ok()) << Batch();
  for (const float bad : {kNan, kInf, -kInf}) {
    input.hidden[9] = bad;
    ExpectError(Batch(), Code::kInvalidArgument, {"sequences[1].input.hidden_states[2, 1]"});
  }
  input.hidden.assign(11, 0.0f);
  ExpectError(Batch(), Code::kInvalidArgument, {"sequences[1].input.hidden_states", "rows of 4"});
  input.hidden.assign(8, 0.0f);
  input.tokens = {1};
  ExpectError(Batch(), Code::kInvalidArgument, {"sequences[1].input", "exactly one"});
}

TEST_F(ValidateTest, InputLengths) {
  options_.max_input_tokens = 2;
  ExpectError(Batch(), Code::kOutOfRange, {"sequences[0].input.token_ids", "3", "limit of 2"});
  options_.max_input_tokens = 3;
  EXPECT_TRUE(Batch().ok());
  batch_.kind = CallKind::kStep;
  options_.max_step_tokens = 2;
  ExpectError(Batch(), Code::kOutOfRange, {"limits.max_step_tokens"});
  options_.max_step_tokens = 3;
  EXPECT_TRUE(Batch().ok());
  batch_.sequences[1].input.tokens.clear();
  ExpectError(Batch(), Code::kInvalidArgument, {"sequences[1].input is empty"});
  generate_.input.tokens.clear();
  ExpectError(Generate(), Code::kInvalidArgument, {"input is empty"});
  generate_.input.tokens = {1, 2, 3, 4};
  ExpectError(Generate(), Code::kOutOfRange, {"input.token_ids", "limit of 3"});
}

TEST_F(ValidateTest, NextTokenNeedsInput) {
  batch_.sequences[1].output.next_token = true;
  EXPECT_TRUE(Batch().ok());
  batch_.sequences[1].input.tokens.clear();
  ExpectError(Batch(), Code::kInvalidArgument, {"sequences[1].output.next_token"});
  batch_.sequences[1].output.next_token = false;
  batch_.sequences[1].output.top_logprobs = 2;
  ExpectError(Batch(), Code::kInvalidArgument, {"sequences[1].output.top_logprobs"});
}

TEST_F(ValidateTest, Sampling) {
  struct Case {
    const char* field;
    void (*set)(Sampling*);
  };
  const Case bad[] = {
      {"temperature", [](Sampling* s) { s->temperature = -0.1f; }},
      {"temperature", [](Sampling* s) { s->temperature = kNan; }},
      {"temperature", [](Sampling* s) { s->temperature = kInf; }},
      {"top_k", [](Sampling* s) { s->top_k = -1; }},
      {"top_p", [](Sampling* s) { s->top_p = 0.0f; }},
      {"top_p", [](Sampling* s) { s->top_p = 1.01f; }},
      {"top_p", [](Sampling* s) { s->top_p = kNan; }},
      {"min_p", [](Sampling* s) { s->min_p = 1.0f; }},
      {"min_p", [](Sampling* s) { s->min_p = -0.1f; }},
      {"min_p", [](Sampling* s) { s->min_p = kNan; }},
      {"repetition_penalty", [](Sampling* s) { s->repetition_penalty = 0.0f; }},
      {"repetition_penalty", [](Sampling* s) { s->repetition_penalty = kNan; }},
      {"repetition_penalty", [](Sampling* s) { s->repetition_penalty = kInf; }},
  };
  batch_.sequences[1].output.next_token = true;
  for (const Case& c : bad) {
    batch_.sequences[1].output.sampling = {};
    c.set(&batch_.sequences[1].output.sampling);
    ExpectError(Batch(), Code::kInvalidArgument,
                {std::string("sequences[1].output.sampling.") + c.field + " is"});
    generate_.sampling = {};
    c.set(&generate_.sampling);
    ExpectError(Generate(), Code::kInvalidArgument, {std::string("sampling.") + c.field + " is"});
  }
  generate_.sampling = {0.0f, 0, 1.0f, 0.0f, 0.5f, 0};
  EXPECT_TRUE(Generate().ok());
  generate_.sampling = {2.0f, 1'000'000, 1e-6f, 0.999f, 2.0f, 0};
  EXPECT_TRUE(Generate().ok());
}

TEST_F(ValidateTest, TopLogprobs) {
  generate_.top_logprobs = -1;
  ExpectError(Generate(), Code::kInvalidArgument, {"top_logprobs is -1"});
  generate_.top_logprobs = 20;
  EXPECT_TRUE(Generate().ok());
  generate_.top_logprobs = 21;
  ExpectError(Generate(), Code::kOutOfRange, {"top_logprobs is 21", "limit of 20"});
  info_.vocab_size = 10;
  generate_.top_logprobs = 11;
  ExpectError(Generate(), Code::kOutOfRange, {"limit of 10"});
}

TEST_F(ValidateTest, MaxNewTokensAndStopTokens) {
  for (const int64_t bad : {int64_t{0}, int64_t{-1}}) {
    generate_.max_new_tokens = bad;
    ExpectError(Generate(), Code::kInvalidArgument, {"max_new_tokens is " + std::to_string(bad)});
  }
  generate_.max_new_tokens = std::numeric_limits<int64_t>::max();
  ExpectError(Generate(), Code::kOutOfRange, {"max_new_tokens", "1048576"});
  generate_.max_new_tokens = 1;
  generate_.stop_token_ids = {1, 100};
  ExpectError(Generate(), Code::kInvalidArgument, {"stop_token_ids[1] is 100"});
}

TEST_F(ValidateTest, LayersNotHeld) {
  info_.has_embedding = false;
  ExpectError(Batch(), Code::kFailedPrecondition, {"sequences[0].input.token_ids", "embedding"});
  ExpectError(Generate(), Code::kFailedPrecondition, {"embedding"});
  info_.has_embedding = true;
  info_.has_head = false;
  EXPECT_TRUE(Batch().ok());
  batch_.sequences[1].output.logits = Positions::kLast;
  ExpectError(Batch(), Code::kFailedPrecondition, {"sequences[1].output.logits", "head"});
  batch_.sequences[1].output.logits = Positions::kNone;
  batch_.sequences[1].output.next_token = true;
  ExpectError(Batch(), Code::kFailedPrecondition, {"sequences[1].output.next_token", "head"});
  ExpectError(Generate(), Code::kFailedPrecondition, {"head"});
}

TEST_F(ValidateTest, OutputBytes) {
  options_.max_output_bytes = 3 * 100 * 4 + 1 * 4 * 4;
  batch_.sequences[0].output.logits = Positions::kAll;
  EXPECT_TRUE(Batch().ok());
  batch_.sequences[1].output.hidden = Positions::kLast;
  EXPECT_TRUE(Batch().ok()) << Batch();
  batch_.sequences[1].output.hidden = Positions::kAll;
  ExpectError(Batch(), Code::kOutOfRange, {"1248 bytes", "1216"});
  // Sizes that do not fit into 64 bits are over the limit, not under it.
  info_.vocab_size = std::numeric_limits<int64_t>::max() / 2;
  ExpectError(Batch(), Code::kOutOfRange, {"limits.max_output_bytes"});
}

TEST_F(ValidateTest, StreamedLogitsFitIntoAMessage) {
  generate_.return_logits = true;
  options_.max_output_bytes = 1000;
  EXPECT_TRUE(Generate().ok());
  EXPECT_EQ(StreamBufferLimit(generate_, options_, info_), 2);
  options_.max_output_bytes = 399;
  ExpectError(Generate(), Code::kOutOfRange, {"400 bytes"});
  options_.max_output_bytes = 1 << 30;
  EXPECT_EQ(StreamBufferLimit(generate_, options_, info_), 64);
  generate_.return_logits = false;
  options_.max_output_bytes = 1;
  EXPECT_EQ(StreamBufferLimit(generate_, options_, info_), 64);
}

TEST_F(ValidateTest, Options) {
  EXPECT_TRUE(ValidateOptions(options_, info_).ok());
  EngineOptions bad = options_;
  bad.max_batch_rows = 0;
  ExpectError(ValidateOptions(bad, info_), Code::kInvalidArgument, {"max_batch_rows is 0"});
  bad = options_;
  bad.default_ttl_ms = -1;
  ExpectError(ValidateOptions(bad, info_), Code::kInvalidArgument, {"default_ttl_ms is -1"});
  bad = options_;
  bad.prefill_chunk_tokens = 513;
  ExpectError(ValidateOptions(bad, info_), Code::kInvalidArgument,
              {"prefill_chunk_tokens (513)", "prefill_token_budget (512)"});
  bad = options_;
  bad.max_input_tokens = 7;
  ExpectError(ValidateOptions(bad, info_), Code::kInvalidArgument,
              {"max_step_tokens (8)", "max_input_tokens (7)"});
  info_.num_slots = 1;
  ExpectError(ValidateOptions(options_, info_), Code::kInvalidArgument, {"1 state slots"});
}

}  // namespace
}  // namespace gdn::engine
