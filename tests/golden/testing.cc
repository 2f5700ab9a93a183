#include "tests/golden/testing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>

namespace gdn::golden {
namespace {

// A test cannot go on without its data.
template <typename T>
T Must(absl::StatusOr<T> value) {
  if (!value.ok()) {
    ADD_FAILURE() << value.status();
    std::abort();
  }
  return *std::move(value);
}

template <typename T>
std::vector<T> Copy(const model::TensorInfo& tensor) {
  std::vector<T> values(tensor.data.size() / sizeof(T));
  std::memcpy(values.data(), tensor.data.data(), values.size() * sizeof(T));
  return values;
}

double Gap(std::vector<float> row) {
  std::nth_element(row.begin(), row.begin() + 1, row.end(), std::greater<float>());
  return double{row[0]} - double{row[1]};
}

}  // namespace

Goldens::Goldens(const std::string& path) : file_(Must(model::SafetensorsFile::Open(path))) {}

bool Goldens::Has(const std::string& name) const { return file_->Find(name) != nullptr; }

const model::TensorInfo& Goldens::Get(const std::string& name) const {
  const model::TensorInfo* tensor = file_->Find(name);
  if (tensor == nullptr) {
    ADD_FAILURE() << file_->path() << " has no tensor " << name;
    std::abort();
  }
  return *tensor;
}

std::vector<float> Goldens::Floats(const std::string& name) const { return Copy<float>(Get(name)); }
std::vector<int32_t> Goldens::Ints(const std::string& name) const {
  return Copy<int32_t>(Get(name));
}

std::string SourcePath(const std::string& relative) {
  return std::string(GDN_SOURCE_DIR) + "/" + relative;
}

std::vector<Checkpoint> Checkpoints() {
  return {{"demo", SourcePath("deploy/models/demo-gdn-7m"),
           SourcePath("tests/data/demo-gdn-7m/golden.safetensors")},
          {"d64", SourcePath("tests/data/models/qwen3_5-pure-d64"),
           SourcePath("tests/data/models/qwen3_5-pure-d64/golden.safetensors")},
          {"r3", SourcePath("tests/data/models/qwen3_5-pure-r3"),
           SourcePath("tests/data/models/qwen3_5-pure-r3/golden.safetensors")}};
}

std::vector<Checkpoint> Gdn2Models() {
  return {{"gdn2", SourcePath("tests/data/models/gdn2"), ""},
          {"gdn2_128", SourcePath("tests/data/models/gdn2-128"), ""},
          {"gdn2_mixed", SourcePath("tests/data/models/gdn2-mixed"), ""}};
}

std::unique_ptr<pipeline::Pipeline> LoadStack(const std::string& model_dir,
                                              const StackOptions& options) {
  model::LoadOptions load;
  load.path = model_dir;
  load.layers = options.layers;
  load.random_weights = options.random_weights;
  return Must(pipeline::CreateCpuPipeline(Must(model::LoadModel(load)), options.cpu));
}

double RelativeL2(std::span<const float> a, std::span<const float> b) {
  if (a.size() != b.size() || a.empty()) return std::numeric_limits<double>::infinity();
  double error = 0;
  double norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double difference = double{a[i]} - double{b[i]};
    error += difference * difference;
    norm += double{b[i]} * double{b[i]};
  }
  const double ratio = std::sqrt(error / norm);
  return std::isfinite(ratio) ? ratio : std::numeric_limits<double>::infinity();
}

int64_t ArgMax(std::span<const float> row) {
  size_t best = 0;
  for (size_t i = 1; i < row.size(); ++i) {
    if (row[i] > row[best]) best = i;
  }
  return static_cast<int64_t>(best);
}

std::string Key(int prompt, const std::string& name) { return std::to_string(prompt) + "." + name; }

void ExpectGoldenRows(std::span<const float> ours, std::span<const float> golden, size_t vocab,
                      double bound, double min_gap) {
  ASSERT_EQ(ours.size(), golden.size());
  ASSERT_EQ(golden.size() % vocab, 0u);
  for (size_t row = 0; row < golden.size() / vocab; ++row) {
    const std::span<const float> a = ours.subspan(row * vocab, vocab);
    const std::span<const float> b = golden.subspan(row * vocab, vocab);
    ASSERT_LE(RelativeL2(a, b), bound) << "position " << row;
    if (Gap({b.begin(), b.end()}) > min_gap) {
      ASSERT_EQ(ArgMax(a), ArgMax(b)) << "position " << row;
    }
  }
}

namespace {

// Compares the states after a prompt; returns the number of layers that the goldens hold.
int ExpectGoldenStates(const pipeline::SlotState& state, const Goldens& goldens, int prompt,
                       const model::ModelSpec& spec, double bound) {
  const model::GdnDims& dims = spec.gdn;
  int compared = 0;
  for (int64_t layer = 0; layer < spec.num_layers; ++layer) {
    const std::string name = "layer" + std::to_string(layer);
    if (!goldens.Has(Key(prompt, name + ".recurrent_state"))) continue;
    SCOPED_TRACE(Key(prompt, name));
    ++compared;
    // The golden is [HV][K][V], ours [HV][V][K].
    const std::vector<float> golden = goldens.Floats(Key(prompt, name + ".recurrent_state"));
    EXPECT_EQ(static_cast<int64_t>(golden.size()), dims.recurrent_elements());
    std::vector<float> ours(golden.size());
    const float* block = state.recurrent.data() + layer * dims.recurrent_elements();
    for (int64_t h = 0; h < dims.value_heads; ++h) {
      for (int64_t k = 0; k < dims.key_dim; ++k) {
        for (int64_t v = 0; v < dims.value_dim; ++v) {
          ours[static_cast<size_t>((h * dims.key_dim + k) * dims.value_dim + v)] =
              block[(h * dims.value_dim + v) * dims.key_dim + k];
        }
      }
    }
    EXPECT_LE(RelativeL2(ours, golden), bound);
    // Both hold the newest columns; ours W-1 of them, zeros before the first token.
    const std::vector<float> tail = goldens.Floats(Key(prompt, name + ".conv_input_tail"));
    const int64_t channels = dims.conv_channels();
    const int64_t kept =
        std::min<int64_t>(static_cast<int64_t>(tail.size()) / channels, dims.conv_width - 1);
    const std::span<const float> golden_window =
        std::span<const float>(tail).last(static_cast<size_t>(kept * channels));
    const std::span<const float> our_window =
        std::span<const float>(state.conv)
            .subspan(static_cast<size_t>(layer * dims.conv_elements()),
                     static_cast<size_t>(dims.conv_elements()));
    EXPECT_LE(RelativeL2(our_window.last(golden_window.size()), golden_window), bound);
    for (const float zero : our_window.first(our_window.size() - golden_window.size())) {
      EXPECT_EQ(zero, 0.0f);
    }
  }

  return compared;
}

std::vector<float> FeedOneByOne(Session& session, std::span<const int32_t> tokens) {
  std::vector<float> rows;
  for (const int32_t token : tokens) {
    const std::vector<float> row = session.Feed({&token, 1});
    rows.insert(rows.end(), row.begin(), row.end());
  }
  return rows;
}

}  // namespace

void ExpectPrefillGoldens(pipeline::Pipeline* pipeline, const Goldens& goldens,
                          const GoldenBounds& bounds) {
  int prompts = 0;
  for (; goldens.Has(Key(prompts, "prompt")); ++prompts) {
    SCOPED_TRACE(prompts);
    Session session(pipeline, 1 + prompts % 3);
    ExpectGoldenRows(session.Feed(goldens.Ints(Key(prompts, "prompt")), pipeline::Positions::kAll),
                     goldens.Floats(Key(prompts, "logits")),
                     static_cast<size_t>(pipeline->info().vocab_size), bounds.logits,
                     bounds.min_gap);
  }
  EXPECT_GE(prompts, 3);
}

void ExpectDecodeGoldens(pipeline::Pipeline* pipeline, const Goldens& goldens,
                         const Checkpoint& checkpoint, const GoldenBounds& bounds) {
  int prompts = 0;
  for (; goldens.Has(Key(prompts, "greedy_logits")); ++prompts) {
    SCOPED_TRACE(prompts);
    Session session(pipeline, 1);
    session.Feed(goldens.Ints(Key(prompts, "prompt")));
    ExpectGoldenRows(FeedOneByOne(session, goldens.Ints(Key(prompts, "greedy"))),
                     goldens.Floats(Key(prompts, "greedy_logits")),
                     static_cast<size_t>(pipeline->info().vocab_size), bounds.logits,
                     bounds.min_gap);
  }
  if (checkpoint.name == "demo") {
    EXPECT_GE(prompts, 1);
  }
}

void ExpectStateGoldens(pipeline::Pipeline* pipeline, const Goldens& goldens,
                        const Checkpoint& checkpoint, const GoldenBounds& bounds) {
  model::LoadOptions load;
  load.path = checkpoint.model_dir;
  const model::ModelSpec spec = model::LoadModel(load)->spec;
  int compared = 0;
  for (int prompt = 0; goldens.Has(Key(prompt, "prompt")); ++prompt) {
    Session session(pipeline, 3);
    session.Feed(goldens.Ints(Key(prompt, "prompt")));
    compared += ExpectGoldenStates(session.State(), goldens, prompt, spec, bounds.states);
  }
  if (checkpoint.name == "demo") {
    EXPECT_EQ(compared, 6);
  }
}

std::vector<int32_t> TextTokens(size_t sequence, size_t length) {
  std::vector<int32_t> tokens(length);
  uint32_t state = 12345u + 977u * static_cast<uint32_t>(sequence);
  for (int32_t& token : tokens) {
    state = state * 1664525u + 1013904223u;
    token = static_cast<int32_t>(32u + (state >> 16) % 95u);
  }
  return tokens;
}

void CompareRaggedPrefill(
    pipeline::Pipeline* pipeline,
    const std::function<void(std::span<const float>, std::span<const float>)>& compare) {
  const std::vector<size_t> lengths = {0, 1, 3, 64, 65, 500, 2, 63, 128, 1};
  std::vector<std::vector<int32_t>> prompts;
  std::vector<pipeline::SequenceInput> batch;
  for (size_t i = 0; i < lengths.size(); ++i) prompts.push_back(TextTokens(i, lengths[i]));
  for (size_t i = 0; i < lengths.size(); ++i) {
    batch.push_back({.write_slot = static_cast<int64_t>(1 + i),
                     .fresh = true,
                     .tokens = prompts[i],
                     .want_logits = pipeline::Positions::kAll});
  }
  std::vector<pipeline::SequenceOutput> outputs;
  ASSERT_TRUE(pipeline->Run(batch, &outputs).ok());
  std::vector<std::vector<float>> together;
  for (const pipeline::SequenceOutput& output : outputs) {
    together.emplace_back(output.logits.begin(), output.logits.end());
  }
  for (size_t i = 0; i < lengths.size(); ++i) {
    SCOPED_TRACE(lengths[i]);
    Session alone(pipeline, 100);
    compare(together[i], alone.Feed(prompts[i], pipeline::Positions::kAll));
  }
}

double HeldOutBitsPerByte(pipeline::Pipeline* pipeline) {
  std::ifstream file(SourcePath("tests/data/demo-gdn-7m/heldout.bin"), std::ios::binary);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
  EXPECT_EQ(bytes.size(), 32768u);
  const auto vocab = static_cast<size_t>(pipeline->info().vocab_size);
  double bits = 0;
  int64_t predicted = 0;
  for (size_t begin = 0; begin < bytes.size(); begin += 4096) {
    std::vector<int32_t> tokens;
    for (size_t i = begin; i < begin + 4096; ++i) {
      tokens.push_back(static_cast<unsigned char>(bytes[i]));
    }
    Session session(pipeline, 1);
    const std::vector<float> logits = session.Feed(tokens, pipeline::Positions::kAll);
    if (logits.size() != tokens.size() * vocab) return NAN;
    for (size_t i = 0; i + 1 < tokens.size(); ++i) {
      const float* row = logits.data() + i * vocab;
      const double top = *std::max_element(row, row + vocab);
      double sum = 0;
      for (size_t id = 0; id < vocab; ++id) sum += std::exp(row[id] - top);
      bits -= (row[tokens[i + 1]] - top - std::log(sum)) / std::log(2.0);
      ++predicted;
    }
  }
  return bits / static_cast<double>(predicted);
}

std::vector<float> Session::Feed(std::span<const int32_t> tokens, pipeline::Positions logits) {
  pipeline::SequenceInput input;
  input.read_slot = slot_;
  input.write_slot = slot_;
  input.fresh = fresh_;
  input.tokens = tokens;
  input.want_logits = logits;
  std::vector<pipeline::SequenceOutput> outputs;
  const absl::Status status = pipeline_->Run({&input, 1}, &outputs);
  EXPECT_TRUE(status.ok()) << status;
  if (!status.ok()) return {};
  EXPECT_TRUE(outputs[0].finite);
  fresh_ = false;
  return {outputs[0].logits.begin(), outputs[0].logits.end()};
}

pipeline::SlotState Session::State() const { return Must(pipeline_->ReadSlot(slot_)); }

}  // namespace gdn::golden
