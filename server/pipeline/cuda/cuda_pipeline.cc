#include "server/pipeline/cuda/cuda_pipeline.h"

#include <array>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gdn/kernels/embedding.h"
#include "server/pipeline/cuda/cuda_batch.h"
#include "server/pipeline/cuda/cuda_head.h"
#include "server/pipeline/cuda/cuda_ops.h"
#include "server/pipeline/cuda/cuda_stack.h"
#include "server/pipeline/cuda/decode_graphs.h"
#include "server/pipeline/cuda/device_info.h"
#include "server/pipeline/cuda/device_model.h"
#include "server/pipeline/cuda/device_state_pool.h"
#include "server/pipeline/cuda/step_io.h"

namespace gdn::pipeline {
namespace {

// Left free beside the state pool: graphs, module images, and buffers that grow on demand.
constexpr int64_t kReserveBytes = int64_t{768} << 20;

// Of every model, and of each type of layer.
constexpr std::array<std::string_view, 9> kOpNames = {"step_io",  "embedding",    "in_proj",
                                                      "out_proj", "gate_up_proj", "down_proj",
                                                      "gather",   "head",         "sample"};
constexpr std::array<std::string_view, 2> kLinearAttentionOpNames = {"fused_decode",
                                                                     "fused_prefill"};
constexpr std::array<std::string_view, 6> kGdn2OpNames = {
    "gdn2_gates", "causal_conv", "qk_norm", "gdn2_step", "gdn2_prefill", "gated_rms_norm"};

std::vector<std::string_view> OpNamesOf(const model::ModelSpec& spec) {
  std::vector<std::string_view> names(kOpNames.begin(), kOpNames.end());
  if (spec.Has(model::LayerType::kLinearAttention)) {
    names.insert(names.end(), kLinearAttentionOpNames.begin(), kLinearAttentionOpNames.end());
  }
  if (spec.Has(model::LayerType::kGdn2)) {
    names.insert(names.end(), kGdn2OpNames.begin(), kGdn2OpNames.end());
  }
  return names;
}

class CudaPipeline final : public Pipeline {
 public:
  CudaPipeline(model::ModelSpec spec, const CudaOptions& options)
      : spec_(std::move(spec)), options_(options), op_names_(OpNamesOf(spec_)) {}
  // What is in flight still uses the buffers.
  ~CudaPipeline() override {
    if (ops_.stream() != nullptr) (void)cudaStreamSynchronize(ops_.stream());
  }

  absl::Status Create(model::Model model, CudaReport* report);

  const PipelineInfo& info() const override { return info_; }
  std::span<const std::string_view> OpNames() const override { return op_names_; }
  void set_kernel_timer(KernelTimer* timer) override {
    timer_ = timer;
    launched_of_phase_.fill(0);
  }

  absl::Status Launch(std::span<const SequenceInput> inputs) override;
  absl::Status Wait(std::vector<SequenceOutput>* outputs) override;
  absl::Status CopySlot(int64_t from, int64_t to) override;
  absl::StatusOr<SlotState> ReadSlot(int64_t slot) override;

 private:
  absl::Status CheckSlot(int64_t slot) const;
  absl::Status CheckSize(const CudaBatch& batch) const;
  absl::Status UseOwnDevice() const {
    return CudaStatus(cudaSetDevice(options_.device_index), "cannot use the device");
  }
  absl::Status LaunchBatch(std::span<const SequenceInput> inputs, CudaBatch* batch);
  absl::Status LaunchDecode(int64_t rows, bool greedy);
  absl::Status LaunchPacked(std::span<const SequenceInput> inputs, CudaBatch* batch);
  absl::Status Embed(int64_t tokens);
  absl::Status SendPacked(std::span<const SequenceInput> inputs, const CudaBatch& batch);
  absl::Status FetchHidden(CudaBatch* batch);
  // Batch number `step`, which is in flight or was, until step + 2 is launched.
  CudaBatch& batch(int64_t step) { return batches_[static_cast<size_t>(step % 2)]; }

  const model::ModelSpec spec_;
  const CudaOptions options_;
  const std::vector<std::string_view> op_names_;
  PipelineInfo info_;
  KernelTimer* timer_ = nullptr;
  std::array<int64_t, 3> launched_of_phase_{};

  DeviceModel weights_;
  DeviceStatePool states_;
  CudaOps ops_;
  StepIo io_;
  CudaStack stack_;
  CudaHead head_;
  DeviceArray<float> x_;             // [max_step_tokens, hidden], the residual stream
  DeviceArray<int32_t> cu_seqlens_;  // [max_rows + 1]
  DecodeGraphs graphs_;
  DecodeGraphs greedy_graphs_;
  std::array<CudaBatch, 2> batches_;
  int64_t launched_ = 0;
  int64_t awaited_ = 0;
};

absl::Status CudaPipeline::Create(model::Model model, CudaReport* report) {
  absl::StatusOr<DeviceInfo> device = UseDevice(options_.device_index);
  if (!device.ok()) return device.status();
  info_.vocab_size = spec_.vocab_size;
  info_.hidden_size = spec_.hidden_size;
  info_.has_embedding = model.layers.has_embedding();
  info_.has_head = model.layers.has_head(spec_);
  info_.eos_token_ids = spec_.eos_token_ids;
  info_.max_in_flight = 2;
  const int64_t num_layers = model.layers.size();
  const int64_t max_rows = options_.max_rows;
  const int64_t max_tokens = options_.max_step_tokens;

  GDN_RETURN_IF_ERROR(weights_.Load(std::move(model.weights), model.layers));
  GDN_RETURN_IF_ERROR(ops_.Create());
  GDN_RETURN_IF_ERROR(stack_.Create(spec_, &weights_, &states_, &ops_, max_rows, max_tokens,
                                    options_.batch_invariant));
  GDN_RETURN_IF_ERROR(
      head_.Create(spec_, &weights_, &ops_, max_rows, max_tokens, options_.batch_invariant));
  GDN_RETURN_IF_ERROR(ops_.AllocateWorkspace());
  GDN_RETURN_IF_ERROR(io_.Create(max_rows, max_tokens));
  GDN_RETURN_IF_ERROR(
      x_.Allocate(max_tokens * info_.hidden_size, "cannot allocate the activations"));
  GDN_RETURN_IF_ERROR(cu_seqlens_.Allocate(max_rows + 1, "cannot allocate the activations"));
  for (CudaBatch& batch : batches_) {
    for (CudaEvent* event : {&batch.begin, &batch.done}) {
      absl::StatusOr<CudaEvent> created = CreateEvent(cudaEventDefault);
      if (!created.ok()) return created.status();
      *event = *std::move(created);
    }
  }

  absl::StatusOr<DeviceInfo> left = UseDevice(options_.device_index);
  if (!left.ok()) return left.status();
  GDN_RETURN_IF_ERROR(states_.Create(spec_.gdn, num_layers, options_.num_slots, options_.state_type,
                                     left->free_bytes - kReserveBytes));
  info_.num_slots = states_.num_slots();
  info_.state_bytes_per_slot = states_.bytes_per_slot();
  info_.weight_bytes = static_cast<int64_t>(weights_.memory.bytes());
  info_.workspace_bytes = ops_.workspace_bytes();

  if (info_.has_embedding && info_.has_head) {
    GDN_RETURN_IF_ERROR(graphs_.Capture(
        max_rows, ops_.stream(), [this](int64_t rows) { return LaunchDecode(rows, false); }));
    if (head_.greedy_rows() > 0) {
      GDN_RETURN_IF_ERROR(
          greedy_graphs_.Capture(head_.greedy_rows(), ops_.stream(),
                                 [this](int64_t rows) { return LaunchDecode(rows, true); }));
    }
    GDN_RETURN_IF_ERROR(
        CudaStatus(cudaStreamSynchronize(ops_.stream()), "cannot capture a decode step"));
    GDN_RETURN_IF_ERROR(io_.Reset());
  }
  if (report == nullptr) return absl::OkStatus();
  left = UseDevice(options_.device_index);
  if (!left.ok()) return left.status();
  report->device_name = device->name;
  report->weight_bytes = info_.weight_bytes;
  report->upload_bytes_per_second = weights_.upload_bytes_per_second;
  report->state_bytes = info_.num_slots * info_.state_bytes_per_slot;
  report->free_bytes = left->free_bytes;
  report->num_graphs = graphs_.size() + greedy_graphs_.size();
  report->graph_sizes = graphs_.Sizes();
  report->greedy_graph_sizes = greedy_graphs_.Sizes();
  return absl::OkStatus();
}

absl::Status CudaPipeline::CheckSlot(int64_t slot) const {
  if (slot >= 0 && slot < info_.num_slots) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("slot ", slot, " is outside [0, ", info_.num_slots, ")"));
}

absl::Status CudaPipeline::CheckSize(const CudaBatch& batch) const {
  const auto rows = static_cast<int64_t>(batch.sequences.size());
  if (rows > options_.max_rows) {
    return absl::InvalidArgumentError(absl::StrCat("batch: ", rows, " sequences, at most ",
                                                   options_.max_rows, " fit (--max-batch-rows)"));
  }
  if (batch.plan.num_tokens > options_.max_step_tokens) {
    return absl::InvalidArgumentError(absl::StrCat("batch: ", batch.plan.num_tokens,
                                                   " tokens, at most ", options_.max_step_tokens,
                                                   " fit (--prefill-token-budget)"));
  }
  return absl::OkStatus();
}

absl::Status CudaPipeline::Launch(std::span<const SequenceInput> inputs) {
  if (launched_ - awaited_ >= info_.max_in_flight) {
    return absl::FailedPreconditionError(
        absl::StrCat(info_.max_in_flight, " batches are in flight: wait for the oldest first"));
  }
  GDN_RETURN_IF_ERROR(UseOwnDevice());
  CudaBatch& next = batch(launched_);
  next.step = launched_;
  absl::Status status = LaunchBatch(inputs, &next);
  if (status.ok()) {
    status = CudaStatus(cudaEventRecord(next.done.get(), ops_.stream()), "cannot launch a step");
  }
  if (!status.ok()) {
    // Part of it may be running; the turn has not passed on, so the next batch takes it again.
    (void)cudaStreamSynchronize(ops_.stream());
    if (ops_.timing()) (void)ops_.StopTiming();
    return status;
  }
  ++launched_;
  return absl::OkStatus();
}

absl::Status CudaPipeline::LaunchBatch(std::span<const SequenceInput> inputs, CudaBatch* next) {
  CudaBatch* previous = launched_ > 0 ? &batch(launched_ - 1) : nullptr;
  GDN_RETURN_IF_ERROR(next->Build(inputs, info_, previous));
  GDN_RETURN_IF_ERROR(CheckSize(*next));
  const int64_t of_phase = launched_of_phase_[static_cast<size_t>(next->plan.phase)]++;
  const int64_t interval = options_.timed_interval;
  // Never two in flight: they share the events.
  next->timed = timer_ != nullptr && interval > 0 && of_phase % interval == 0 &&
                !(launched_ > awaited_ && previous->timed);
  const auto rows = static_cast<int64_t>(inputs.size());
  const bool graph = next->decode && !next->timed;
  const bool greedy = next->greedy && rows <= head_.greedy_rows();
  const DecodeGraphs& graphs = greedy ? greedy_graphs_ : graphs_;
  const int64_t padded = graph ? graphs.PaddedRows(rows) : rows;
  GDN_RETURN_IF_ERROR(next->Fill(inputs, info_, previous, padded, io_.rows(launched_)));
  next->measured = timer_ != nullptr;
  if (next->measured) {
    if (next->decode) timer_->OnGraphReplay(graph, padded - rows);
    // The stream passes it when the batch before has ended.
    GDN_RETURN_IF_ERROR(
        CudaStatus(cudaEventRecord(next->begin.get(), ops_.stream()), "cannot time a step"));
  }
  if (graph) return graphs.Launch(padded, ops_.stream());
  if (next->timed) {
    ops_.StartTiming();
    timer_->OnDecodeStateBytes(2 * info_.state_bytes_per_slot * next->plan.steps.size());
  }
  GDN_RETURN_IF_ERROR(next->decode ? LaunchDecode(rows, greedy) : LaunchPacked(inputs, next));
  return next->timed ? ops_.StopTiming() : absl::OkStatus();
}

absl::Status CudaPipeline::Embed(int64_t tokens) {
  gdn_embedding_args args{};
  args.rows = tokens;
  args.vocab = info_.vocab_size;
  args.dim = info_.hidden_size;
  args.ids = io_.arrays().ids;
  args.table = weights_.embedding;
  args.table_dtype = GDN_BF16;
  args.y = x_.data();
  args.y_dtype = GDN_F32;
  args.y_row_stride = info_.hidden_size;
  return ops_.Run("embedding", gdn_embedding, args);
}

absl::Status CudaPipeline::LaunchDecode(int64_t rows, bool greedy) {
  GDN_RETURN_IF_ERROR(ops_.Section("step_io"));
  GDN_RETURN_IF_ERROR(io_.Begin(rows, rows, rows, ops_.stream()));
  GDN_RETURN_IF_ERROR(Embed(rows));
  const StackBatch stack = {.step_rows = rows, .num_tokens = rows};
  GDN_RETURN_IF_ERROR(stack_.Run(stack, io_.arrays(), x_.data()));
  GDN_RETURN_IF_ERROR(greedy ? head_.RunGreedy(rows, io_.arrays(), x_.data())
                             : head_.RunDense(rows, io_.arrays(), x_.data()));
  GDN_RETURN_IF_ERROR(ops_.Section("step_io"));
  return io_.End(rows, x_.data(), info_.hidden_size, ops_.stream());
}

absl::Status CudaPipeline::LaunchPacked(std::span<const SequenceInput> inputs, CudaBatch* next) {
  const auto rows = static_cast<int64_t>(inputs.size());
  const BatchPlan& plan = next->plan;
  GDN_RETURN_IF_ERROR(ops_.Section("step_io"));
  GDN_RETURN_IF_ERROR(SendPacked(inputs, *next));
  GDN_RETURN_IF_ERROR(io_.Begin(rows, plan.steps.size(), plan.num_sampled, ops_.stream()));
  if (plan.num_tokens > 0) {
    if (info_.has_embedding) GDN_RETURN_IF_ERROR(Embed(plan.num_tokens));
    if (next->any_hidden_in) {
      for (size_t i = 0; i < inputs.size(); ++i) {
        if (inputs[i].hidden.empty()) continue;
        const int64_t first = plan.places[i].first_token * info_.hidden_size;
        GDN_RETURN_IF_ERROR(CudaStatus(
            cudaMemcpyAsync(x_.data() + first, next->hidden_in.data() + first,
                            inputs[i].hidden.size_bytes(), cudaMemcpyHostToDevice, ops_.stream()),
            "cannot copy hidden states"));
      }
    }
    const StackBatch stack = {.step_rows = plan.steps.size(),
                              .prefills = plan.prefills.size(),
                              .num_tokens = plan.num_tokens,
                              .cu_seqlens = cu_seqlens_.data()};
    GDN_RETURN_IF_ERROR(stack_.Run(stack, io_.arrays(), x_.data()));
    GDN_RETURN_IF_ERROR(FetchHidden(next));
    GDN_RETURN_IF_ERROR(head_.Run(next, io_.arrays(), x_.data()));
  }
  GDN_RETURN_IF_ERROR(ops_.Section("step_io"));
  return io_.End(rows, x_.data(), info_.hidden_size, ops_.stream());
}

absl::Status CudaPipeline::SendPacked(std::span<const SequenceInput> inputs,
                                      const CudaBatch& next) {
  const BatchPlan& plan = next.plan;
  if (inputs.empty() || plan.num_tokens == 0) return absl::OkStatus();
  GDN_RETURN_IF_ERROR(
      CudaStatus(cudaMemcpyAsync(io_.arrays().ids, next.ids.data(),
                                 static_cast<size_t>(plan.num_tokens) * sizeof(int32_t),
                                 cudaMemcpyHostToDevice, ops_.stream()),
                 "cannot copy token ids"));
  return CudaStatus(cudaMemcpyAsync(cu_seqlens_.data(), next.cu_seqlens.data(),
                                    plan.prefills.cu_seqlens.size() * sizeof(int32_t),
                                    cudaMemcpyHostToDevice, ops_.stream()),
                    "cannot copy sequence lengths");
}

absl::Status CudaPipeline::FetchHidden(CudaBatch* next) {
  if (!next->any_hidden_out) return absl::OkStatus();
  const int64_t count = next->plan.num_tokens * info_.hidden_size;
  GDN_RETURN_IF_ERROR(
      next->hidden_out.Grow(count, "cannot allocate pinned memory for hidden states"));
  return CudaStatus(cudaMemcpyAsync(next->hidden_out.data(), x_.data(),
                                    static_cast<size_t>(count) * sizeof(float),
                                    cudaMemcpyDeviceToHost, ops_.stream()),
                    "cannot copy hidden states");
}

absl::Status CudaPipeline::Wait(std::vector<SequenceOutput>* outputs) {
  if (launched_ == awaited_) return absl::FailedPreconditionError("no batch is in flight");
  CudaBatch& oldest = batch(awaited_++);
  GDN_RETURN_IF_ERROR(CudaStatus(cudaEventSynchronize(oldest.done.get()), "a step failed"));
  if (oldest.timed) GDN_RETURN_IF_ERROR(ops_.Report(oldest.plan.phase, timer_));
  if (oldest.measured && timer_ != nullptr) {
    float milliseconds = 0;
    GDN_RETURN_IF_ERROR(
        CudaStatus(cudaEventElapsedTime(&milliseconds, oldest.begin.get(), oldest.done.get()),
                   "cannot time a step"));
    timer_->OnGpuBusy(oldest.plan.phase, static_cast<int64_t>(double{milliseconds} * 1e6));
  }
  oldest.Collect(io_.results(oldest.step), info_, outputs);
  return absl::OkStatus();
}

absl::Status CudaPipeline::CopySlot(int64_t from, int64_t to) {
  GDN_RETURN_IF_ERROR(CheckSlot(from));
  GDN_RETURN_IF_ERROR(CheckSlot(to));
  GDN_RETURN_IF_ERROR(UseOwnDevice());
  return states_.CopySlot(from, to, ops_.stream());
}

absl::StatusOr<SlotState> CudaPipeline::ReadSlot(int64_t slot) {
  GDN_RETURN_IF_ERROR(CheckSlot(slot));
  GDN_RETURN_IF_ERROR(UseOwnDevice());
  return states_.ReadSlot(slot, ops_.stream());
}

absl::Status CheckOptions(const CudaOptions& options) {
  if (options.max_rows < 1 || options.max_step_tokens < options.max_rows) {
    return absl::InvalidArgumentError(
        absl::StrCat("a batch needs room for at least one row and one token a row, got ",
                     options.max_rows, " rows and ", options.max_step_tokens, " tokens"));
  }
  if (options.num_slots != 0 && options.num_slots < 2) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the state pool needs at least 2 slots (one is reserved), got ", options.num_slots));
  }
  if (options.state_type != GDN_F32 && options.state_type != GDN_BF16) {
    return absl::InvalidArgumentError("the state is float32 or bfloat16");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Pipeline>> CreateCudaPipeline(model::Model model,
                                                             const CudaOptions& options,
                                                             CudaReport* report) {
  GDN_RETURN_IF_ERROR(CheckOptions(options));
  auto pipeline = std::make_unique<CudaPipeline>(model.spec, options);
  GDN_RETURN_IF_ERROR(pipeline->Create(std::move(model), report));
  return pipeline;
}

}  // namespace gdn::pipeline
