// File: fake_pipeline.h
//
// A pipeline without a model: a slot's state is a running hash of everything it has consumed, and
// every output is derived from that hash, so a wrong slot, a lost, doubled or reordered token, or a
// state left over from another session shows in the very next output. FakeSequence predicts the
// outputs of one session alone.
//
// It checks its callers: slot ranges, aliasing, slots read before they were written, two threads at
// once, ids out of range, sampling an empty input, too many batches in flight, inputs that change
// before their Wait, chains to a row that chooses nothing. A breach is recorded in violations().
#ifndef SERVER_ENGINE_TESTING_FAKE_PIPELINE_H_
#define SERVER_ENGINE_TESTING_FAKE_PIPELINE_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "server/pipeline/pipeline.h"

namespace gdn::engine {

// One recorded sequence of one Run.
struct FakeRunItem {
  int64_t slot = -1;
  bool fresh = false;
  int64_t tokens = 0;
  bool sampled = false;
  bool chained = false;
};

class FakePipeline final : public pipeline::Pipeline {
 public:
  static pipeline::PipelineInfo DefaultInfo(int64_t num_slots);

  explicit FakePipeline(pipeline::PipelineInfo info);
  explicit FakePipeline(int64_t num_slots) : FakePipeline(DefaultInfo(num_slots)) {}

  const pipeline::PipelineInfo& info() const override { return info_; }
  std::span<const std::string_view> OpNames() const override { return {}; }
  void set_kernel_timer(pipeline::KernelTimer*) override {}
  // The work is done in Launch, and shown in Wait.
  absl::Status Launch(std::span<const pipeline::SequenceInput> inputs) override;
  absl::Status Wait(std::vector<pipeline::SequenceOutput>* outputs) override;
  absl::Status CopySlot(int64_t from, int64_t to) override;

  // Called at the start of each Launch, without a lock: may block, move a clock, or give an error.
  void set_on_run(std::function<absl::Status()> f) { on_run_ = std::move(f); }
  // The same for each Wait.
  void set_on_wait(std::function<absl::Status()> f) { on_wait_ = std::move(f); }
  void set_on_copy(std::function<absl::Status(int64_t to)> f) { on_copy_ = std::move(f); }
  // Sequences that consume this token become non-finite.
  void set_poison_token(int32_t token) { poison_token_ = token; }
  // Every choice is this token.
  void set_sampled_token(int32_t token) { sampled_token_ = token; }

  // Between runs.
  const std::vector<std::vector<FakeRunItem>>& runs() const { return runs_; }
  // The order of things: L for a Launch, W for a Wait.
  const std::string& events() const { return events_; }
  int64_t batches_in_flight() const { return static_cast<int64_t>(in_flight_.size()); }
  void clear_runs() {
    runs_.clear();
    events_.clear();
  }
  void set_record_runs(bool record) { record_runs_ = record; }
  std::vector<std::string> violations() const;

 private:
  struct Slot {
    uint64_t state = 0;
    bool written = false;
  };

  // What one input's spans and pointer held at its Launch.
  struct InputCopy {
    std::vector<int32_t> tokens;
    std::vector<float> hidden;
    std::optional<pipeline::SampleSpec> sample;
    std::vector<int32_t> history;
  };
  struct Batch {
    std::vector<pipeline::SequenceInput> inputs;
    std::vector<InputCopy> copies;
    std::vector<pipeline::SequenceOutput> outputs;
    std::vector<std::vector<float>> buffers;  // Two for each output.
    std::vector<std::vector<pipeline::TokenLogprob>> tops;
  };

  void Violation(const std::string& what);
  void CheckInputs(std::span<const pipeline::SequenceInput> inputs);
  void CheckChain(const pipeline::SequenceInput& input);
  void CheckIntact(const Batch& batch);
  static InputCopy Copy(const pipeline::SequenceInput& input);
  absl::Status Advance(std::span<const pipeline::SequenceInput> inputs, Batch* batch);
  // Runs one sequence of a batch.
  FakeRunItem AdvanceOne(const pipeline::SequenceInput& input, size_t index, Batch* batch);
  // Makes garbage of what a failed batch and those after it have done with its slots.
  void Lose(const Batch& failed);

  const pipeline::PipelineInfo info_;
  std::vector<Slot> slots_;
  std::function<absl::Status()> on_run_;
  std::function<absl::Status()> on_wait_;
  std::function<absl::Status(int64_t)> on_copy_;
  int32_t poison_token_ = -1;
  std::optional<int32_t> sampled_token_;
  bool record_runs_ = true;
  std::vector<std::vector<FakeRunItem>> runs_;
  std::string events_;
  std::deque<Batch> in_flight_;
  Batch awaited_;  // Its outputs are valid until the next Launch.
  // Of the batch launched last: what each row has chosen, or kNothing.
  static constexpr int32_t kNothing = -2;
  std::vector<int32_t> choices_;
  std::atomic<int> users_{0};
  mutable std::mutex mu_;
  std::vector<std::string> violations_;
};

// What the fake pipeline gives for one session, alone and in order.
class FakeSequence {
 public:
  explicit FakeSequence(const pipeline::PipelineInfo& info) : info_(info) {}

  void Consume(int32_t token);
  void ConsumeHidden(std::span<const float> row);
  void ConsumeAll(std::span<const int32_t> tokens) {
    for (const int32_t token : tokens) Consume(token);
  }
  std::vector<float> Logits() const;
  std::vector<float> Hidden() const;
  // The token the fake sampler chooses now, at this position of the session.
  pipeline::TokenLogprob Sample(const pipeline::SampleSpec& spec) const;
  std::vector<pipeline::TokenLogprob> Top(int32_t count) const;
  // Greedy-like: samples with `seed`, consumes the token, and so on.
  std::vector<int32_t> Generate(int64_t count, uint64_t seed);

  int64_t position() const { return position_; }
  uint64_t state() const { return state_; }
  void set_state(uint64_t state) { state_ = state; }
  void set_position(int64_t position) { position_ = position; }

  static constexpr uint64_t kZeroState = 0x1234567;

 private:
  pipeline::PipelineInfo info_;
  uint64_t state_ = kZeroState;
  int64_t position_ = 0;
};

}  // namespace gdn::engine

#endif  // SERVER_ENGINE_TESTING_FAKE_PIPELINE_H_
