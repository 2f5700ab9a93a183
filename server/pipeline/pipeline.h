// File: pipeline.h
//
// The layer stack as the engine sees it: a pool of state slots, and batches that advance a
// ragged set of sequences by their inputs. Confined to one thread (the engine's).
#ifndef SERVER_PIPELINE_PIPELINE_H_
#define SERVER_PIPELINE_PIPELINE_H_

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace gdn::pipeline {

enum class Positions { kNone, kLast, kAll };

// Facts about the stack that do not change while it lives.
struct PipelineInfo {
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t num_slots = 0;
  int64_t state_bytes_per_slot = 0;
  bool has_embedding = false;
  bool has_head = false;
  std::vector<int32_t> eos_token_ids;
  // Batches that may be launched before the oldest of them is awaited.
  int32_t max_in_flight = 1;
  // Held for good, beside num_slots * state_bytes_per_slot of states.
  int64_t weight_bytes = 0;
  int64_t workspace_bytes = 0;
};

// How to choose the token after a sequence's last position; see gdn/kernels/sampling.h.
struct SampleSpec {
  float temperature = 0.0f;
  int32_t top_k = 0;
  float top_p = 1.0f;
  float min_p = 0.0f;
  float repetition_penalty = 1.0f;
  uint64_t seed = 0;
  int64_t position = 0;              // Of the token to be chosen, in its session.
  std::span<const int32_t> history;  // Distinct ids for the repetition penalty.
  int32_t top_logprobs = 0;
};

// One sequence of a batch: T inputs, as token ids or as rows of hidden states.
struct SequenceInput {
  int64_t read_slot = -1;           // In [0, num_slots).
  int64_t write_slot = -1;          // Distinct within a batch, and nobody else's read slot.
  bool fresh = false;               // Start from the zero state; read_slot is ignored.
  std::span<const int32_t> tokens;  // [T], in [0, vocab_size); or
  std::span<const float> hidden;    // [T, hidden_size]; or
  // the one token that the batch launched just before this one chooses for its sequence of this
  // index, which has `sample`: it need not have come back yet. Only with max_in_flight > 1.
  int64_t chained = -1;
  Positions want_logits = Positions::kNone;
  Positions want_hidden = Positions::kNone;
  const SampleSpec* sample = nullptr;  // Choose a token after the last input (T >= 1).
};

struct TokenLogprob {
  int32_t id = -1;
  float logprob = 0.0f;
};

// Spans point into the pipeline's buffers and are valid until the next Launch.
struct SequenceOutput {
  bool finite = true;             // False: NaN or infinity in the state or outputs; treat as lost.
  std::span<const float> logits;  // [n, vocab_size]
  std::span<const float> hidden;  // [n, hidden_size], before the final norm
  TokenLogprob token;             // If sample was given.
  std::span<const TokenLogprob> top;  // [top_logprobs]
};

// A slot's whole state in the canonical layout, widened to FP32.
struct SlotState {
  std::vector<float> recurrent;  // [layers][HV][V][K]
  std::vector<float> conv;       // [layers][W-1][C], raw q|k|v columns, oldest first
};

enum class Phase { kPrefill, kDecode, kMixed };

// What a pipeline measures, told on the engine thread.
class KernelTimer {
 public:
  virtual ~KernelTimer() = default;
  // An op of a batch whose ops are timed, and its time on the device. `op` is one of
  // Pipeline::OpNames().
  virtual void OnKernel(std::string_view op, Phase phase, int64_t duration_ns) = 0;
  // State bytes that a timed run of the decode kernel read and wrote.
  virtual void OnDecodeStateBytes(int64_t /*bytes*/) {}
  // A GPU: how long it worked for a batch, from its first operation to the end of its last.
  virtual void OnGpuBusy(Phase /*phase*/, int64_t /*duration_ns*/) {}
  // A GPU: a decode batch was launched, as a captured graph with this many padding rows, or not.
  virtual void OnGraphReplay(bool /*hit*/, int64_t /*padding_rows*/) {}
};

class Pipeline {
 public:
  virtual ~Pipeline() = default;

  virtual const PipelineInfo& info() const = 0;
  // The closed set of op names reported to KernelTimer.
  virtual std::span<const std::string_view> OpNames() const = 0;
  virtual void set_kernel_timer(KernelTimer* timer) = 0;

  // Hands a batch over. A sequence of T == 0 is allowed and leaves its state as it is. Sequences do
  // not influence each other. The inputs' spans must stay valid until the batch's Wait; batches run
  // in the order of their launches. An error, here or from Wait, means that nothing can be said
  // about the states of the batch's write slots; after one from here the batch is not in flight.
  // FAILED_PRECONDITION: max_in_flight batches are in flight.
  virtual absl::Status Launch(std::span<const SequenceInput> inputs) = 0;

  // Ends the oldest batch in flight; `outputs` gets one entry per input. FAILED_PRECONDITION: none
  // is in flight.
  virtual absl::Status Wait(std::vector<SequenceOutput>* outputs) = 0;

  // Both in one, with nothing in flight.
  absl::Status Run(std::span<const SequenceInput> inputs, std::vector<SequenceOutput>* outputs) {
    outputs->clear();
    absl::Status status = Launch(inputs);
    if (status.ok()) status = Wait(outputs);
    return status;
  }

  // Copies the whole state of a slot, bit by bit, as the batches launched so far leave it.
  virtual absl::Status CopySlot(int64_t from, int64_t to) = 0;

  // Reads a slot back, with nothing in flight. UNIMPLEMENTED where a pipeline keeps no such state.
  virtual absl::StatusOr<SlotState> ReadSlot(int64_t /*slot*/) {
    return absl::UnimplementedError("this pipeline keeps no readable state");
  }
};

}  // namespace gdn::pipeline

#endif  // SERVER_PIPELINE_PIPELINE_H_
