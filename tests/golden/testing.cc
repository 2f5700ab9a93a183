#include "tests/golden/testing.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
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

std::unique_ptr<pipeline::Pipeline> LoadStack(const std::string& model_dir,
                                              const StackOptions& options) {
  model::LoadOptions load;
  load.path = model_dir;
  load.layers = options.layers;
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
