#include <cstdio>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cpp/gdnctl/command.h"
#include "client/cpp/gdnctl/json.h"

namespace gdn::gdnctl {
namespace {

void Row(const char* name, const std::string& value) {
  std::printf("%-22s%s\n", name, value.c_str());
}

void PrintModel(const v1::ModelInfo& model) {
  Row("name", model.name());
  Row("architecture", model.architecture());
  Row("fingerprint", model.fingerprint());
  Row("device",
      absl::StrCat(model.device(), ", products in ", model.precision(), ", state in ",
                   model.state_type(), model.batch_invariant() ? ", batch invariant" : ""));
  Row("parameters", absl::StrCat(model.num_parameters()));
  Row("vocabulary",
      absl::StrCat(model.vocab_size(), model.byte_vocabulary() ? ", ids 0..255 are bytes" : ""));
  Row("hidden size", absl::StrCat(model.hidden_size()));
  std::string parts;
  if (model.has_embedding()) parts += ", with embedding";
  if (model.has_head()) parts += ", with head";
  Row("layers", absl::StrCat("[", model.first_layer(), ", ", model.last_layer(), ") of ",
                             model.num_layers(), parts));
  Row("heads", absl::StrCat(model.key_heads(), " key heads of ", model.key_dim(), ", ",
                            model.value_heads(), " value heads of ", model.value_dim()));
  Row("end tokens", absl::StrJoin(model.eos_token_ids(), ", "));
  if (model.has_bos_token_id()) Row("begin token", absl::StrCat(model.bos_token_id()));
  const v1::Limits& limits = model.limits();
  Row("sessions", absl::StrCat("up to ", limits.max_sessions(), " of ",
                               model.state_bytes_per_session(), " bytes"));
  Row("a call takes",
      absl::StrCat(limits.max_batch_sequences(), " sequences of ", limits.max_input_tokens(),
                   " tokens, in a step ", limits.max_step_tokens()));
  Row("a call returns",
      absl::StrCat(limits.max_new_tokens(), " new tokens, ", limits.max_output_bytes(),
                   " bytes of tensors, ", limits.top_logprobs(), " top log probabilities"));
  Row("largest message", absl::StrCat(limits.max_message_bytes(), " bytes"));
  Row("server version", model.server_version());
}

}  // namespace

void AddModelCommand(CLI::App* app, Command* command) {
  CLI::App* model = app->add_subcommand("model", "Show the model served, and the server's limits");
  model->callback([command] {
    command->run = [command] {
      const GlobalFlags& flags = command->flags;
      const auto client = Connect(flags);
      if (!client.ok()) return ReportFailure(flags, "ask for the model", client.status());
      if (flags.json) {
        std::fputs(Line(ToJson((*client)->model())).c_str(), stdout);
      } else {
        PrintModel((*client)->model());
      }
      return FlushOutput(flags);
    };
  });
}

}  // namespace gdn::gdnctl
