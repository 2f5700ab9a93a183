// Flags that say what to feed to the model, shared by generate, prefill and step.
#ifndef CLIENT_CPP_GDNCTL_INPUT_FLAGS_H_
#define CLIENT_CPP_GDNCTL_INPUT_FLAGS_H_

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "gdn/v1/inference.pb.h"

namespace gdn::gdnctl {

struct InputFlags {
  std::string prompt;
  std::string file;
  std::string ids;
  std::string hidden;
  std::string shape;
  // Which of them were given, as an empty string is a value.
  const CLI::Option* prompt_option = nullptr;
  const CLI::Option* file_option = nullptr;
  const CLI::Option* ids_option = nullptr;
  const CLI::Option* hidden_option = nullptr;
};

// `app` must outlive `flags`.
void AddInputFlags(CLI::App* app, InputFlags* flags, bool with_hidden);

// Reads the one input given. A status is a mistake of the user's, with a message for them.
absl::StatusOr<v1::Input> ReadInput(const InputFlags& flags, const v1::ModelInfo& model);

// "1,2,3" or "1 2 3". `flag` is named in the message of an error.
absl::StatusOr<std::vector<int32_t>> ParseIds(const std::string& flag, const std::string& text);

struct SamplingFlags {
  std::optional<float> temperature;
  std::optional<int32_t> top_k;
  std::optional<float> top_p;
  std::optional<float> min_p;
  std::optional<float> repetition_penalty;
  std::optional<uint64_t> seed;
};

void AddSamplingFlags(CLI::App* app, SamplingFlags* flags);
// Sets what was given and nothing else: the server knows the defaults and checks the ranges.
void ApplySampling(const SamplingFlags& flags, v1::Sampling* sampling);

}  // namespace gdn::gdnctl

#endif  // CLIENT_CPP_GDNCTL_INPUT_FLAGS_H_
