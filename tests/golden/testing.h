// What the golden tests share: a checkpoint with its goldens, and a small driver of the pipeline.
#ifndef TESTS_GOLDEN_TESTING_H_
#define TESTS_GOLDEN_TESTING_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "server/model/model_spec.h"
#include "server/model/safetensors.h"
#include "server/model/weights.h"
#include "server/pipeline/cpu_pipeline.h"

namespace gdn::golden {

// A golden file's tensors by name.
class Goldens {
 public:
  explicit Goldens(const std::string& path);
  bool Has(const std::string& name) const;
  std::vector<float> Floats(const std::string& name) const;
  std::vector<int32_t> Ints(const std::string& name) const;

 private:
  const model::TensorInfo& Get(const std::string& name) const;
  std::shared_ptr<const model::SafetensorsFile> file_;
};

// A checkpoint of the test data: its folder and its goldens' file.
struct Checkpoint {
  std::string name;
  std::string model_dir;
  std::string golden_path;
};
std::vector<Checkpoint> Checkpoints();
std::string SourcePath(const std::string& relative);

// Folders of the test data with a configuration alone: models of gdn2 layers and of a mixture, for
// made-up weights.
std::vector<Checkpoint> Gdn2Models();

struct StackOptions {
  pipeline::CpuOptions cpu;
  std::optional<model::LayerRange> layers;
  std::optional<uint64_t> random_weights;
};
std::unique_ptr<pipeline::Pipeline> LoadStack(const std::string& model_dir,
                                              const StackOptions& options);

// ||a - b|| / ||b||; infinite if the sizes differ or anything is not finite.
double RelativeL2(std::span<const float> a, std::span<const float> b);

// Index of the largest value, the lowest on ties.
int64_t ArgMax(std::span<const float> row);

// The name of a prompt's tensor among the goldens.
std::string Key(int prompt, const std::string& name);

// Compares rows of logits one position at a time: relative L2, and the first choice where the
// golden's two best differ by more than `min_gap`.
void ExpectGoldenRows(std::span<const float> ours, std::span<const float> golden, size_t vocab,
                      double bound, double min_gap);

// How near a pipeline must come to the goldens.
struct GoldenBounds {
  double logits;   // Relative L2 at every position.
  double min_gap;  // First choices are compared where the golden's two best differ by more.
  double states;   // Relative L2.
};
// Each prompt at once, against its logits at every position.
void ExpectPrefillGoldens(pipeline::Pipeline* pipeline, const Goldens& goldens,
                          const GoldenBounds& bounds);
// The golden's own tokens are fed, so that one near-tie does not decide everything behind it. Only
// the demo model's goldens have such logits.
void ExpectDecodeGoldens(pipeline::Pipeline* pipeline, const Goldens& goldens,
                         const Checkpoint& checkpoint, const GoldenBounds& bounds);
// The states after each prompt, where the goldens have them.
void ExpectStateGoldens(pipeline::Pipeline* pipeline, const Goldens& goldens,
                        const Checkpoint& checkpoint, const GoldenBounds& bounds);

// Printable characters, others for each sequence.
std::vector<int32_t> TextTokens(size_t sequence, size_t length);

// Prompts of many lengths, none among them, in one batch on slots 1 and up, and each alone: calls
// compare(together, alone) with the logits at all positions of each.
void CompareRaggedPrefill(
    pipeline::Pipeline* pipeline,
    const std::function<void(std::span<const float>, std::span<const float>)>& compare);

// Of 32,768 bytes the demo model was not trained on, in windows of 4,096 from an empty state.
double HeldOutBitsPerByte(pipeline::Pipeline* pipeline);

// One sequence on one slot, advanced call by call.
class Session {
 public:
  Session(pipeline::Pipeline* pipeline, int64_t slot) : pipeline_(pipeline), slot_(slot) {}

  // Feeds tokens; returns the logits asked for.
  std::vector<float> Feed(std::span<const int32_t> tokens,
                          pipeline::Positions logits = pipeline::Positions::kLast);
  pipeline::SlotState State() const;

 private:
  pipeline::Pipeline* pipeline_;
  int64_t slot_;
  bool fresh_ = true;
};

}  // namespace gdn::golden

#endif  // TESTS_GOLDEN_TESTING_H_
