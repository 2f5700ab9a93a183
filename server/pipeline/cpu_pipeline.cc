#include "server/pipeline/cpu_pipeline.h"

#include <sched.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "gdn/kernels/embedding.h"
#include "gdn/kernels/rms_norm.h"
#include "server/pipeline/batch_plan.h"
#include "server/pipeline/layer_stack.h"
#include "server/pipeline/sampler.h"

namespace gdn::pipeline {
namespace {

// Long enough to bridge the gap between two ops of a step, short enough not to burn an idle core.
constexpr int32_t kSpinMicroseconds = 50;
// Rows per product with batch_invariant: the smallest block at which the wide kernels pay off.
constexpr int32_t kInvariantRowBlock = 8;

// Of every model, and of each type of layer.
constexpr std::array<std::string_view, 11> kOpNames = {
    "embedding", "rms_norm",     "in_proj",   "causal_conv", "gated_rms_norm", "out_proj",
    "silu_mul",  "gate_up_proj", "down_proj", "head",        "sample"};
constexpr std::array<std::string_view, 3> kLinearAttentionOpNames = {"gates", "delta_rule_step",
                                                                     "delta_rule_prefill"};
constexpr std::array<std::string_view, 4> kGdn2OpNames = {"gdn2_gates", "qk_norm", "gdn2_step",
                                                          "gdn2_prefill"};

std::vector<std::string_view> OpNamesOf(const PackedModel& model) {
  const auto has = [&model](model::LayerType type) {
    return std::any_of(model.layers.begin(), model.layers.end(),
                       [type](const PackedLayer& layer) { return layer.type == type; });
  };
  std::vector<std::string_view> names(kOpNames.begin(), kOpNames.end());
  if (has(model::LayerType::kLinearAttention)) {
    names.insert(names.end(), kLinearAttentionOpNames.begin(), kLinearAttentionOpNames.end());
  }
  if (has(model::LayerType::kGdn2)) {
    names.insert(names.end(), kGdn2OpNames.begin(), kGdn2OpNames.end());
  }
  return names;
}

int32_t AvailableCores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

bool AllFinite(const float* row, int64_t size) {
  // Adding x * 0 keeps 0 for finite values and turns NaN or infinity into NaN.
  float sum = 0.0f;
  for (int64_t i = 0; i < size; ++i) sum += row[i] * 0.0f;
  return sum == 0.0f;
}

class CpuPipeline final : public Pipeline {
 public:
  CpuPipeline(model::ModelSpec spec, PackedModel weights, StatePool states, OpRunner::PoolPtr pool,
              PipelineInfo info)
      : spec_(std::move(spec)),
        weights_(std::move(weights)),
        states_(std::move(states)),
        info_(std::move(info)),
        op_names_(OpNamesOf(weights_)),
        ops_(GDN_BACKEND_CPU, std::move(pool)),
        stack_(spec_, &weights_, &states_, &ops_),
        sampler_(&ops_, info_.vocab_size) {}

  const PipelineInfo& info() const override { return info_; }
  std::span<const std::string_view> OpNames() const override { return op_names_; }
  void set_kernel_timer(KernelTimer* timer) override { ops_.set_timer(timer); }

  void Reserve(int64_t tokens) {
    x_.Reserve(tokens * info_.hidden_size);
    stack_.Reserve(tokens);
    info_.workspace_bytes = x_.bytes() + stack_.bytes();
  }

  // The work is done here; Wait only hands it out.
  absl::Status Launch(std::span<const SequenceInput> inputs) override {
    if (in_flight_) {
      return absl::FailedPreconditionError("one batch at a time: wait for the one in flight first");
    }
    try {
      GDN_RETURN_IF_ERROR(RunOps(inputs, &outputs_));
    } catch (const std::bad_alloc&) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "out of memory for a batch of ", inputs.size(),
          " sequences; use a smaller prefill token budget, or ask for fewer logits at once"));
    }
    in_flight_ = true;
    return absl::OkStatus();
  }

  absl::Status Wait(std::vector<SequenceOutput>* outputs) override {
    if (!in_flight_) return absl::FailedPreconditionError("no batch is in flight");
    in_flight_ = false;
    outputs->swap(outputs_);
    return absl::OkStatus();
  }

  absl::Status CopySlot(int64_t from, int64_t to) override {
    GDN_RETURN_IF_ERROR(CheckSlot(from));
    GDN_RETURN_IF_ERROR(CheckSlot(to));
    states_.CopySlot(from, to);
    return absl::OkStatus();
  }

  absl::StatusOr<SlotState> ReadSlot(int64_t slot) override {
    GDN_RETURN_IF_ERROR(CheckSlot(slot));
    return states_.ReadSlot(slot);
  }

 private:
  absl::Status CheckSlot(int64_t slot) const {
    if (slot >= 0 && slot < info_.num_slots) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("slot ", slot, " is outside [0, ", info_.num_slots, ")"));
  }

  absl::Status RunOps(std::span<const SequenceInput> inputs, std::vector<SequenceOutput>* outputs) {
    outputs->assign(inputs.size(), {});
    GDN_RETURN_IF_ERROR(plan_.Build(inputs, info_));
    ops_.set_phase(plan_.phase);
    Reserve(plan_.num_tokens);
    GDN_RETURN_IF_ERROR(Embed(inputs));
    GDN_RETURN_IF_ERROR(stack_.Run(plan_, x_.data()));
    GDN_RETURN_IF_ERROR(Head());
    GDN_RETURN_IF_ERROR(sampler_.Run(inputs, plan_, logits_.data()));
    for (size_t i = 0; i < inputs.size(); ++i) Collect(inputs[i], plan_.places[i], &(*outputs)[i]);
    return absl::OkStatus();
  }

  // Token rows are gathered from the table, hidden rows are copied.
  absl::Status Embed(std::span<const SequenceInput> inputs) {
    ids_.clear();
    bool any_tokens = false;
    ids_.resize(static_cast<size_t>(plan_.num_tokens), 0);
    for (size_t i = 0; i < inputs.size(); ++i) {
      std::copy(inputs[i].tokens.begin(), inputs[i].tokens.end(),
                ids_.begin() + plan_.places[i].first_token);
      any_tokens = any_tokens || !inputs[i].tokens.empty();
    }
    if (any_tokens) {
      gdn_embedding_args args{};
      args.rows = plan_.num_tokens;
      args.vocab = info_.vocab_size;
      args.dim = info_.hidden_size;
      args.ids = ids_.data();
      args.table = weights_.embedding.data();
      args.table_dtype = weights_.embedding_type;
      args.y = x_.data();
      args.y_dtype = GDN_F32;
      args.y_row_stride = info_.hidden_size;
      GDN_RETURN_IF_ERROR(ops_.Run("embedding", gdn_embedding, args));
    }
    for (size_t i = 0; i < inputs.size(); ++i) {
      std::copy(inputs[i].hidden.begin(), inputs[i].hidden.end(),
                x_.data() + plan_.places[i].first_token * info_.hidden_size);
    }
    return absl::OkStatus();
  }

  // Final norm and head, for the rows that need them.
  absl::Status Head() {
    const auto rows = static_cast<int64_t>(plan_.logits_tokens.size());
    if (rows == 0) return absl::OkStatus();
    head_in_.Reserve(rows * info_.hidden_size);
    logits_.Reserve(rows * info_.vocab_size);
    for (int64_t r = 0; r < rows; ++r) {
      const float* row =
          x_.data() + plan_.logits_tokens[static_cast<size_t>(r)] * info_.hidden_size;
      std::copy(row, row + info_.hidden_size, head_in_.data() + r * info_.hidden_size);
    }
    gdn_rms_norm_args norm{};
    norm.rows = rows;
    norm.dim = info_.hidden_size;
    norm.x = head_in_.data();
    norm.x_dtype = GDN_F32;
    norm.x_row_stride = info_.hidden_size;
    norm.weight = weights_.final_norm.data();
    norm.eps = spec_.rms_norm_eps;
    norm.y = head_in_.data();
    norm.y_dtype = GDN_F32;
    norm.y_row_stride = info_.hidden_size;
    GDN_RETURN_IF_ERROR(ops_.Run("rms_norm", gdn_rms_norm, norm));
    gdn_matmul_args product{};
    product.rows = rows;
    product.x = head_in_.data();
    product.x_row_stride = info_.hidden_size;
    product.weight = weights_.head.get();
    product.y = logits_.data();
    product.y_row_stride = info_.vocab_size;
    return ops_.Run("head", gdn_matmul, product, gdn_matmul_workspace);
  }

  void Collect(const SequenceInput& input, const SequencePlace& place, SequenceOutput* output) {
    if (place.num_tokens == 0) return;
    const int64_t hidden = info_.hidden_size;
    const float* first = x_.data() + place.first_token * hidden;
    const float* last = first + (place.num_tokens - 1) * hidden;
    // A damaged state reaches every output that is read from it, so the last row tells.
    output->finite = AllFinite(last, hidden);
    if (input.want_hidden == Positions::kLast) {
      output->hidden = {last, static_cast<size_t>(hidden)};
    } else if (input.want_hidden == Positions::kAll) {
      output->hidden = {first, static_cast<size_t>(place.num_tokens * hidden)};
    }
    if (place.logits_rows > 0) {
      output->logits = {logits_.data() + place.logits_row * info_.vocab_size,
                        static_cast<size_t>(place.logits_rows * info_.vocab_size)};
    }
    if (place.sample_row >= 0) {
      output->token = sampler_.token(place.sample_row);
      output->top = sampler_.top(place.sample_row, input.sample->top_logprobs);
      output->finite = output->finite && output->token.id >= 0;
    }
  }

  const model::ModelSpec spec_;
  const PackedModel weights_;
  StatePool states_;
  PipelineInfo info_;
  const std::vector<std::string_view> op_names_;
  OpRunner ops_;
  LayerStack stack_;
  Sampler sampler_;

  bool in_flight_ = false;
  std::vector<SequenceOutput> outputs_;  // Of the batch in flight.
  BatchPlan plan_;
  std::vector<int32_t> ids_;
  AlignedBuffer<float> x_;        // [T, hidden], the residual stream
  AlignedBuffer<float> head_in_;  // [rows of logits, hidden]
  AlignedBuffer<float> logits_;   // [rows of logits, vocab]
};

absl::StatusOr<std::unique_ptr<Pipeline>> Build(model::Model model, const CpuOptions& options) {
  if (options.threads < 0 || options.threads > 1024) {
    return absl::InvalidArgumentError(
        absl::StrCat("cpu threads must be in 0..1024 (0: all cores), got ", options.threads));
  }
  if (options.num_slots < 2) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the state pool needs at least 2 slots (one is reserved), got ", options.num_slots));
  }
  const int32_t threads = options.threads == 0 ? AvailableCores() : options.threads;
  OpRunner::PoolPtr pool(gdn_cpu_pool_create(threads, threads == 1 ? 0 : kSpinMicroseconds));
  if (pool == nullptr) {
    return absl::ResourceExhaustedError(absl::StrCat("cannot start ", threads,
                                                     " worker threads: ", gdn_last_error(),
                                                     "; use fewer --cpu-threads"));
  }

  PackOptions pack;
  pack.math = options.precision == Precision::kFloat32 ? GDN_MATH_F32 : GDN_MATH_BF16;
  pack.row_block = options.batch_invariant ? kInvariantRowBlock : 0;
  pack.threads = threads;
  absl::StatusOr<PackedModel> packed = PackWeights(std::move(model.weights), model.layers, pack);
  if (!packed.ok()) return packed.status();

  absl::StatusOr<StatePool> states =
      StatePool::Create(model.spec.gdn, model.layers.size(), options.num_slots,
                        options.state_type == StateType::kFloat32 ? GDN_F32 : GDN_BF16);
  if (!states.ok()) return states.status();

  PipelineInfo info;
  info.vocab_size = model.spec.vocab_size;
  info.hidden_size = model.spec.hidden_size;
  info.num_slots = options.num_slots;
  info.state_bytes_per_slot = states->bytes_per_slot();
  info.has_embedding = model.layers.has_embedding();
  info.has_head = model.layers.has_head(model.spec);
  info.eos_token_ids = model.spec.eos_token_ids;
  info.weight_bytes = packed->matrix_bytes();
  auto pipeline =
      std::make_unique<CpuPipeline>(std::move(model.spec), *std::move(packed), *std::move(states),
                                    std::move(pool), std::move(info));
  pipeline->Reserve(options.max_step_tokens);
  return pipeline;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Pipeline>> CreateCpuPipeline(model::Model model,
                                                            const CpuOptions& options) {
  try {
    return Build(std::move(model), options);
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError(
        "out of memory while packing the weights; they are held twice for a moment");
  }
}

}  // namespace gdn::pipeline
