// File: step.h
//
// The steps that have been launched and not completed, oldest first. At most two: the host then
// stays one step behind the device, and a row can be fed the token that the step before its own
// chooses, which the host has not seen yet.
//
// Thread-safety: none; under the engine's lock, except that the engine thread alone touches the
// inside of a step while the pipeline works.
#ifndef SERVER_ENGINE_STEP_H_
#define SERVER_ENGINE_STEP_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "server/engine/call.h"
#include "server/engine/scheduler.h"
#include "server/pipeline/pipeline.h"

namespace gdn::engine {

inline constexpr int kMaxStepsInFlight = 2;

struct Step {
  uint64_t number = 0;
  int64_t start_ns = 0;
  absl::Status launch_status;  // Not OK: the pipeline has nothing of this step to wait for.
  std::vector<BatchItem> batch;
  std::vector<pipeline::SequenceInput> inputs;  // Of the same index.
  std::vector<pipeline::SampleSpec> samples;    // Of the same index, where the input has one.
  std::vector<pipeline::SequenceOutput> outputs;
  std::vector<Call*> calls;  // Each once.
};

// Steps are reused, so that one does not allocate. References stay valid.
class StepQueue {
 public:
  explicit StepQueue(int32_t max_in_flight)
      : limit_(std::clamp(static_cast<int>(max_in_flight), 1, kMaxStepsInFlight)) {}

  int limit() const { return limit_; }
  int size() const { return size_; }
  bool empty() const { return size_ == 0; }
  bool full() const { return size_ == limit_; }
  const Step& operator[](int i) const { return steps_[Index(i)]; }
  Step& front() { return steps_[Index(0)]; }
  const Step& back() const { return steps_[Index(size_ - 1)]; }

  // A new newest step. Not when full.
  Step& Push() {
    Step& step = steps_[Index(size_++)];
    step.number = ++last_number_;
    step.launch_status = absl::OkStatus();
    step.batch.clear();
    step.inputs.clear();
    step.calls.clear();
    return step;
  }
  void PopNewest() { --size_; }
  void PopOldest() {
    first_ = Index(1);
    --size_;
  }

 private:
  size_t Index(int i) const { return (first_ + static_cast<size_t>(i)) % steps_.size(); }

  const int limit_;
  std::array<Step, kMaxStepsInFlight> steps_;
  size_t first_ = 0;
  int size_ = 0;
  uint64_t last_number_ = 0;
};

}  // namespace gdn::engine

#endif  // SERVER_ENGINE_STEP_H_
