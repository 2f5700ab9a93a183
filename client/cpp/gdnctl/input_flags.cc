#include "client/cpp/gdnctl/input_flags.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "gdn/client/input.h"

namespace gdn::gdnctl {
namespace {

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  const auto close = [](std::FILE* file) {
    if (file != stdin) std::fclose(file);
  };
  const std::unique_ptr<std::FILE, decltype(close)> file(
      path == "-" ? stdin : std::fopen(path.c_str(), "rb"), close);
  std::string content;
  if (file != nullptr) {
    char buffer[1 << 16];
    size_t count = 0;
    while ((count = std::fread(buffer, 1, sizeof(buffer), file.get())) > 0) {
      content.append(buffer, count);
    }
    if (std::ferror(file.get()) == 0) return content;
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "cannot read ", path == "-" ? "standard input" : path, ": ", std::strerror(errno)));
}

absl::StatusOr<v1::Input> TextInput(const std::string& text, const v1::ModelInfo& model) {
  if (model.byte_vocabulary()) return client::BytesInput(text);
  return absl::InvalidArgumentError(absl::StrCat(
      "model '", model.name(),
      "' has no byte vocabulary, so text would need its tokenizer: pass token ids with "
      "--ids 1,2,3"));
}

absl::StatusOr<v1::Input> ReadHidden(const InputFlags& flags, const v1::ModelInfo& model) {
  absl::StatusOr<std::string> bytes = ReadFile(flags.hidden);
  if (!bytes.ok()) return bytes.status();
  const int64_t count = static_cast<int64_t>(bytes->size() / sizeof(float));
  std::vector<int64_t> shape;
  if (flags.shape.empty()) {
    if (model.hidden_size() > 0) shape = {count / model.hidden_size(), model.hidden_size()};
  } else {
    absl::StatusOr<std::vector<int32_t>> dims = ParseIds("--shape", flags.shape);
    if (!dims.ok()) return dims.status();
    shape.assign(dims->begin(), dims->end());
  }
  int64_t expected = static_cast<int64_t>(sizeof(float));
  for (const int64_t dim : shape) {
    if (dim < 0 || __builtin_mul_overflow(expected, dim, &expected)) expected = -1;
    if (expected < 0) break;
  }
  if (shape.size() != 2 || expected != static_cast<int64_t>(bytes->size())) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--hidden ", flags.hidden, " has ", bytes->size(), " bytes, which is not the size of [",
        absl::StrJoin(shape, ", "), "] float32 values: a raw little-endian file of [T, ",
        model.hidden_size(), "] is expected (--shape T,", model.hidden_size(), ")"));
  }
  std::vector<float> values(static_cast<size_t>(count));
  if (count > 0) std::memcpy(values.data(), bytes->data(), bytes->size());
  v1::Input input;
  *input.mutable_hidden_states() = client::Float32Tensor(values, shape);
  return input;
}

}  // namespace

void AddInputFlags(CLI::App* app, InputFlags* flags, bool with_hidden) {
  CLI::Option* prompt =
      app->add_option("prompt", flags->prompt,
                      "Text, for a model with a byte vocabulary; '-' reads standard input");
  CLI::Option* file =
      app->add_option("--file", flags->file, "Read the text from this file; '-' is standard input");
  CLI::Option* ids = app->add_option("--ids", flags->ids, "Token ids: 1,2,3");
  prompt->excludes(file)->excludes(ids);
  file->excludes(ids);
  if (with_hidden) {
    CLI::Option* hidden = app->add_option(
        "--hidden", flags->hidden,
        "Read hidden states [T, hidden_size] from this file of raw little-endian float32 values");
    app->add_option("--shape", flags->shape,
                    "Shape of --hidden: T,hidden_size (default: from the size of the file)")
        ->needs(hidden);
    hidden->excludes(prompt)->excludes(file)->excludes(ids);
    flags->hidden_option = hidden;
  }
  flags->prompt_option = prompt;
  flags->file_option = file;
  flags->ids_option = ids;
}

absl::StatusOr<v1::Input> ReadInput(const InputFlags& flags, const v1::ModelInfo& model) {
  if (flags.ids_option->count() > 0) {
    const absl::StatusOr<std::vector<int32_t>> ids = ParseIds("--ids", flags.ids);
    if (!ids.ok()) return ids.status();
    return client::TokensInput(*ids);
  }
  if (flags.hidden_option != nullptr && flags.hidden_option->count() > 0) {
    return ReadHidden(flags, model);
  }
  if (flags.file_option->count() > 0 || flags.prompt == "-") {
    const absl::StatusOr<std::string> text =
        ReadFile(flags.file_option->count() > 0 ? flags.file : "-");
    if (!text.ok()) return text.status();
    return TextInput(*text, model);
  }
  if (flags.prompt_option->count() > 0) return TextInput(flags.prompt, model);
  return absl::InvalidArgumentError(absl::StrCat(
      "there is no input: pass a text as argument, '-' for standard input, --file or --ids",
      flags.hidden_option != nullptr ? ", or --hidden" : ""));
}

absl::StatusOr<std::vector<int32_t>> ParseIds(const std::string& flag, const std::string& text) {
  std::vector<int32_t> ids;
  for (const absl::string_view item :
       absl::StrSplit(text, absl::ByAnyChar(", \t\n"), absl::SkipEmpty())) {
    int32_t id = 0;
    if (!absl::SimpleAtoi(item, &id)) {
      return absl::InvalidArgumentError(absl::StrCat(flag, ": item ", ids.size(), ", '", item,
                                                     "', is not an integer of 32 bits"));
    }
    ids.push_back(id);
  }
  return ids;
}

void AddSamplingFlags(CLI::App* app, SamplingFlags* flags) {
  constexpr char kGroup[] = "Sampling";
  app->add_option("--temperature", flags->temperature, "0: the likeliest token (default)")
      ->group(kGroup);
  app->add_option("--top-k", flags->top_k, "Choose among the K likeliest; 0: all (default)")
      ->group(kGroup);
  app->add_option("--top-p", flags->top_p, "Choose among the likeliest with this mass together")
      ->group(kGroup);
  app->add_option("--min-p", flags->min_p, "Leave out tokens less likely than this times the best")
      ->group(kGroup);
  app->add_option("--repetition-penalty", flags->repetition_penalty,
                  "Above 1: make tokens of the input and output less likely")
      ->group(kGroup);
  app->add_option("--seed", flags->seed, "Repeat the choices of an earlier call")->group(kGroup);
}

void ApplySampling(const SamplingFlags& flags, v1::Sampling* sampling) {
  if (flags.temperature) sampling->set_temperature(*flags.temperature);
  if (flags.top_k) sampling->set_top_k(*flags.top_k);
  if (flags.top_p) sampling->set_top_p(*flags.top_p);
  if (flags.min_p) sampling->set_min_p(*flags.min_p);
  if (flags.repetition_penalty) sampling->set_repetition_penalty(*flags.repetition_penalty);
  if (flags.seed) sampling->set_seed(*flags.seed);
}

}  // namespace gdn::gdnctl
