// prefill and step: one session, fed by hand.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cpp/gdnctl/command.h"
#include "client/cpp/gdnctl/input_flags.h"
#include "client/cpp/gdnctl/json.h"
#include "client/cpp/gdnctl/text.h"
#include "gdn/client/input.h"

namespace gdn::gdnctl {
namespace {

struct SequenceFlags {
  bool is_step = false;
  std::string session_id;
  std::optional<int64_t> expected_position;
  InputFlags input;
  SamplingFlags sampling;
  bool next_token = false;
  int32_t top_logprobs = 0;
  v1::Positions logits = v1::POSITIONS_NONE;
  v1::Positions hidden_states = v1::POSITIONS_NONE;
  std::string save_logits;
  std::string save_hidden;

  std::string what() const {
    return absl::StrCat(is_step ? "step session '" : "prefill session '", session_id, "'");
  }
};

void FillRequest(const SequenceFlags& args, v1::Input input, v1::SequenceRequest* request) {
  request->set_session_id(args.session_id);
  *request->mutable_input() = std::move(input);
  if (args.expected_position) request->set_expected_position(*args.expected_position);
  v1::OutputSelection* output = request->mutable_output();
  output->set_next_token(args.next_token || args.top_logprobs != 0);
  output->set_top_logprobs(args.top_logprobs);
  ApplySampling(args.sampling, output->mutable_sampling());
  // Values to save are values to ask for.
  const auto wanted = [](v1::Positions positions, const std::string& file) {
    return positions == v1::POSITIONS_NONE && !file.empty() ? v1::POSITIONS_ALL : positions;
  };
  output->set_logits(wanted(args.logits, args.save_logits));
  output->set_hidden_states(wanted(args.hidden_states, args.save_hidden));
}

absl::Status SaveTensor(const std::string& path, const v1::Tensor& tensor) {
  const auto values = client::ToFloats(tensor);
  if (!values.ok()) return values.status();
  std::FILE* file = std::fopen(path.c_str(), "wb");
  bool ok = file != nullptr;
  if (ok) {
    ok = std::fwrite(values->data(), sizeof(float), values->size(), file) == values->size();
    ok = std::fclose(file) == 0 && ok;
  }
  return ok ? absl::OkStatus() : absl::UnknownError(absl::StrCat("cannot write ", path));
}

std::string TokenText(const v1::ModelInfo& model, int32_t id, float logprob) {
  char buffer[64];
  std::snprintf(
      buffer, sizeof(buffer), "%d %s%s%.4f", id,
      model.byte_vocabulary() && id < 256 ? QuoteByte(static_cast<uint8_t>(id)).c_str() : "",
      model.byte_vocabulary() && id < 256 ? "  " : " ", static_cast<double>(logprob));
  return buffer;
}

void PrintTensor(const char* name, const v1::Tensor& tensor) {
  const std::string shape = absl::StrJoin(tensor.shape(), ", ");
  const auto values = client::ToFloats(tensor);
  if (!values.ok()) {
    std::printf("%-10s[%s], unreadable: %s\n", name, shape.c_str(),
                std::string(values.status().message()).c_str());
    return;
  }
  if (values->empty()) {
    std::printf("%-10s[%s]\n", name, shape.c_str());
    return;
  }
  double sum_squares = 0;
  for (const float value : *values) sum_squares += static_cast<double>(value) * value;
  const auto [low, high] = std::minmax_element(values->begin(), values->end());
  std::printf("%-10s[%s]  min %.4f  max %.4f  rms %.4f\n", name, shape.c_str(),
              static_cast<double>(*low), static_cast<double>(*high),
              std::sqrt(sum_squares / static_cast<double>(values->size())));
}

void PrintResponse(const v1::ModelInfo& model, const v1::SequenceResponse& response,
                   const v1::Timings& timings) {
  std::printf("%-10s%s\n", "session", response.session_id().c_str());
  std::printf("%-10s%lld\n", "position", static_cast<long long>(response.position()));
  if (response.has_next_token()) {
    const v1::Token& token = response.next_token();
    std::printf("%-10s%s\n", "next", TokenText(model, token.id(), token.logprob()).c_str());
    for (const v1::TokenLogprob& top : token.top_logprobs()) {
      std::printf("%-10s%s\n", "", TokenText(model, top.id(), top.logprob()).c_str());
    }
  }
  if (response.has_logits()) PrintTensor("logits", response.logits());
  if (response.has_hidden_states()) PrintTensor("hidden", response.hidden_states());
  std::printf("%-10squeue %.3f ms  compute %.3f ms  total %.3f ms\n", "time",
              static_cast<double>(timings.queue_ns()) * 1e-6,
              static_cast<double>(timings.compute_ns()) * 1e-6,
              static_cast<double>(timings.total_ns()) * 1e-6);
}

void PrintJson(const v1::SequenceResponse& response, const v1::Timings& timings) {
  Json json = {{"session_id", response.session_id()}, {"position", response.position()}};
  if (response.has_next_token()) json["next_token"] = ToJson(response.next_token());
  if (response.has_logits()) json["logits"] = ToJson(response.logits());
  if (response.has_hidden_states()) json["hidden_states"] = ToJson(response.hidden_states());
  json["timings"] = ToJson(timings);
  std::fputs(Line(json).c_str(), stdout);
}

ExitCode Report(const GlobalFlags& flags, const SequenceFlags& args, const v1::ModelInfo& model,
                const v1::SequenceResponse& response, const v1::Timings& timings) {
  const absl::Status fault = client::SequenceStatus(response);
  if (!fault.ok()) return ReportFailure(flags, args.what(), fault);
  for (const auto& [path, tensor] :
       {std::pair<const std::string&, const v1::Tensor&>(args.save_logits, response.logits()),
        std::pair<const std::string&, const v1::Tensor&>(args.save_hidden,
                                                         response.hidden_states())}) {
    if (path.empty()) continue;
    const absl::Status saved = SaveTensor(path, tensor);
    if (!saved.ok()) return ReportUsage(flags, saved);
  }
  if (flags.json) {
    PrintJson(response, timings);
  } else {
    PrintResponse(model, response, timings);
  }
  return FlushOutput(flags);
}

template <typename Response>
ExitCode ReportBatch(const GlobalFlags& flags, const SequenceFlags& args,
                     const v1::ModelInfo& model, const absl::StatusOr<Response>& response) {
  if (!response.ok()) return ReportFailure(flags, args.what(), response.status());
  if (response->sequences_size() != 1) {
    return ReportFailure(flags, args.what(),
                         absl::InternalError(absl::StrCat("sent one sequence, got ",
                                                          response->sequences_size(), " back")));
  }
  return Report(flags, args, model, response->sequences(0), response->timings());
}

ExitCode Run(const GlobalFlags& flags, const SequenceFlags& args) {
  const auto client = Connect(flags);
  if (!client.ok()) return ReportFailure(flags, args.what(), client.status());
  const v1::ModelInfo& model = (*client)->model();
  absl::StatusOr<v1::Input> input = ReadInput(args.input, model);
  if (!input.ok()) return ReportUsage(flags, input.status());
  if (args.is_step) {
    v1::StepRequest request;
    FillRequest(args, *std::move(input), request.add_sequences());
    return ReportBatch(flags, args, model, (*client)->Step(request));
  }
  v1::PrefillRequest request;
  FillRequest(args, *std::move(input), request.add_sequences());
  return ReportBatch(flags, args, model, (*client)->Prefill(request));
}

void AddOne(CLI::App* app, Command* command, bool is_step) {
  const auto args = std::make_shared<SequenceFlags>();
  args->is_step = is_step;
  CLI::App* sub = is_step ? app->add_subcommand("step", "Advance a session by one or a few tokens")
                          : app->add_subcommand("prefill", "Feed an input to a session");
  sub->add_option("--session", args->session_id, "Session id")->required();
  sub->add_option("--expected-position", args->expected_position,
                  "Refuse if the session is not at this position");
  AddInputFlags(sub, &args->input, /*with_hidden=*/true);

  constexpr char kGroup[] = "Output";
  const std::map<std::string, v1::Positions> positions = {
      {"none", v1::POSITIONS_NONE}, {"last", v1::POSITIONS_LAST}, {"all", v1::POSITIONS_ALL}};
  const auto add_positions = [&](const char* name, v1::Positions* value, const char* help) {
    sub->add_option(name, *value, help)
        ->transform(
            CLI::CheckedTransformer(positions, CLI::ignore_case).description("none|last|all"))
        ->group(kGroup);
  };
  sub->add_flag("--next-token", args->next_token, "Choose the token that follows the input")
      ->group(kGroup);
  sub->add_option("--top-logprobs", args->top_logprobs,
                  "Also report the N likeliest next tokens; implies --next-token")
      ->group(kGroup);
  add_positions("--logits", &args->logits, "Return logits: statistics, or all values with --json");
  add_positions("--hidden-states", &args->hidden_states,
                "Return hidden states after the last layer served, likewise");
  sub->add_option("--save-logits", args->save_logits,
                  "Write the logits to this file as raw little-endian float32 values")
      ->group(kGroup);
  sub->add_option("--save-hidden", args->save_hidden,
                  "The same for hidden states: the --hidden of the server with the next layers")
      ->group(kGroup);
  AddSamplingFlags(sub, &args->sampling);
  sub->callback(
      [command, args] { command->run = [command, args] { return Run(command->flags, *args); }; });
}

}  // namespace

void AddSequenceCommands(CLI::App* app, Command* command) {
  AddOne(app, command, /*is_step=*/false);
  AddOne(app, command, /*is_step=*/true);
}

}  // namespace gdn::gdnctl
