#include "server/rpc/request_log.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "server/rpc/testing/captured_log.h"
#include "server/rpc/testing/rpc_fixture.h"

namespace gdn::rpc {
namespace {

TEST(RequestIdTest, ACallersIdIsKeptIfItIsFitForALog) {
  EXPECT_EQ(ChooseRequestId("trace-1.a_B:9"), "trace-1.a_B:9");
  EXPECT_EQ(ChooseRequestId(std::string(64, 'x')), std::string(64, 'x'));
  for (const std::string& unfit : {std::string(), std::string(65, 'x'), std::string("a b"),
                                   std::string("a\nb"), std::string("\"}")}) {
    EXPECT_NE(ChooseRequestId(unfit), unfit);
    EXPECT_EQ(ChooseRequestId(unfit).size(), 16u);
  }
}

TEST(RequestIdTest, MadeUpOnesAreDistinct) {
  std::set<std::string> ids;
  for (int i = 0; i < 10'000; ++i) EXPECT_TRUE(ids.insert(ChooseRequestId("")).second);
}

class RequestLogTest : public RpcTest {
 protected:
  void SetUp() override {}
  void Start(LoggedRequests which, bool prompts) {
    options_.log = {.which = which, .prompts = prompts};
    RpcTest::SetUp();
  }
  // The id the server says the call has.
  std::string Call(const char* id) {
    Context context;
    if (id != nullptr) context.AddMetadata(kRequestIdKey, id);
    v1::ModelInfo info;
    EXPECT_TRUE(inference_->GetModel(&context, {}, &info).ok());
    const auto& metadata = context.GetServerTrailingMetadata();
    const auto found = metadata.find(kRequestIdKey);
    return found == metadata.end() ? "" : std::string(found->second.data(), found->second.size());
  }
};

TEST_F(RequestLogTest, EveryLineHasTheIdThatTheCallerIsTold) {
  CapturedLog log;
  Start(LoggedRequests::kAll, false);
  EXPECT_EQ(Call("mine"), "mine");
  const std::string made_up = Call(nullptr);
  EXPECT_EQ(made_up.size(), 16u);
  for (const std::string& id : {std::string("mine"), made_up}) {
    EXPECT_TRUE(log.WaitFor("request begins\x1frequest_id=" + id));
    EXPECT_TRUE(log.WaitFor("request ends\x1frequest_id=" + id));
  }
  TearDown();  // Its threads log.
  server_ = nullptr;
}

TEST_F(RequestLogTest, FailuresOfTheServerAreLoggedByDefault) {
  CapturedLog log;
  const RequestLogOptions options;
  RequestRecord record;
  record.id = "r";
  LogRequestEnd(options, record, Rpc::kStep, 0, "", 1);
  LogRequestEnd(options, record, Rpc::kStep, 3, "bad", 1);
  EXPECT_EQ(log.text(), "");
  LogRequestEnd(options, record, Rpc::kStep, 13, "broken", 1);
  EXPECT_NE(log.text().find("code=INTERNAL\x1f"
                            "error=broken"),
            std::string::npos);
  record.fault = absl::DataLossError("NaN");  // Of a sequence, in a call that is OK.
  LogRequestEnd(options, record, Rpc::kPrefill, 0, "", 1);
  EXPECT_NE(log.text().find("code=DATA_LOSS\x1f"
                            "error=NaN"),
            std::string::npos);
}

TEST_F(RequestLogTest, PromptsAreOnlyThereIfAskedFor) {
  CapturedLog log;
  RequestRecord silent, open;
  engine::Input input;
  input.tokens = {4711, 4712};
  silent.AddInput({.which = LoggedRequests::kAll}, "s", input, 4);
  open.AddInput({.which = LoggedRequests::kAll, .prompts = true}, "s", input, 4);
  LogRequestEnd({.which = LoggedRequests::kAll}, silent, Rpc::kGenerate, 0, "", 1);
  EXPECT_EQ(log.text().find("4711"), std::string::npos);
  EXPECT_NE(log.text().find("input_tokens:2"), std::string::npos);
  LogRequestEnd({.which = LoggedRequests::kAll}, open, Rpc::kGenerate, 0, "", 1);
  EXPECT_NE(log.text().find("input_ids=4711 4712"), std::string::npos);
}

}  // namespace
}  // namespace gdn::rpc
