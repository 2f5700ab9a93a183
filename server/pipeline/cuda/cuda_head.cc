#include "server/pipeline/cuda/cuda_head.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace gdn::pipeline {
namespace {

template <typename T>
absl::Status Copy(T* to, const T* from, int64_t count, cudaMemcpyKind kind, cudaStream_t stream) {
  if (count == 0) return absl::OkStatus();
  return CudaStatus(cudaMemcpyAsync(to, from, static_cast<size_t>(count) * sizeof(T), kind, stream),
                    "cannot copy a step's inputs or outputs");
}

}  // namespace

absl::Status CudaHead::Create(const model::ModelSpec& spec, const DeviceModel* weights,
                              CudaOps* ops, int64_t max_rows, int64_t max_tokens,
                              bool batch_invariant) {
  spec_ = spec;
  weights_ = weights;
  ops_ = ops;
  max_rows_ = max_rows;
  if (weights->head == nullptr) return absl::OkStatus();
  gdn_linear_shape shape{};
  shape.n = spec.vocab_size;
  shape.k = spec.hidden_size;
  shape.weight_dtype = GDN_BF16;
  shape.y_dtype = GDN_F32;
  shape.batch_invariant = batch_invariant ? 1 : 0;
  shape.max_rows = max_rows;
  gdn_linear_plan* raw = nullptr;
  const gdn_status status = gdn_linear_plan_create(GDN_BACKEND_CUDA, &shape, &raw);
  plan_.reset(raw);
  GDN_RETURN_IF_ERROR(KernelStatus(status, "head"));
  gdn_linear_args product{};
  product.plan = raw;
  product.rows = max_rows;
  GDN_RETURN_IF_ERROR(ops_->NeedWorkspace("head", gdn_linear_workspace, product));
  gdn_sampling_args sample{};
  sample.rows = max_rows;
  sample.vocab = spec.vocab_size;
  sample.logits_row_stride = spec.vocab_size;
  sample.top_logprobs = static_cast<int32_t>(std::min<int64_t>(spec.vocab_size, kMaxTopLogprobs));
  GDN_RETURN_IF_ERROR(ops_->NeedWorkspace("sample", gdn_sample_workspace, sample));

  // It takes other sums than a product of many rows.
  if (!batch_invariant) GDN_RETURN_IF_ERROR(PrepareGreedy());

  constexpr char kWhat[] = "cannot allocate the logits; use a smaller --max-batch-rows";
  GDN_RETURN_IF_ERROR(gathered_.Allocate(max_rows * spec.hidden_size, kWhat));
  GDN_RETURN_IF_ERROR(logits_.Allocate(max_rows * spec.vocab_size, kWhat));
  GDN_RETURN_IF_ERROR(logits_tokens_.Allocate(max_tokens + max_rows, kWhat));
  GDN_RETURN_IF_ERROR(top_ids_.Allocate(max_rows * kMaxTopLogprobs, kWhat));
  return top_values_.Allocate(max_rows * kMaxTopLogprobs, kWhat);
}

absl::Status CudaHead::PrepareGreedy() {
  constexpr int64_t kMostRows = 256;
  const gdn_linear_argmax_args args = GreedyArgs(std::min(kMostRows, max_rows_));
  gdn_exec exec{};
  exec.backend = GDN_BACKEND_CUDA;
  size_t bytes = 0;
  const gdn_status status = gdn_linear_argmax_workspace(&exec, &args, &bytes);
  if (status == GDN_UNSUPPORTED_SHAPE) return absl::OkStatus();  // Not on this GPU.
  GDN_RETURN_IF_ERROR(KernelStatus(status, "head"));
  greedy_rows_ = args.rows;
  return ops_->NeedWorkspace("head", gdn_linear_argmax_workspace, args);
}

gdn_linear_argmax_args CudaHead::GreedyArgs(int64_t rows) const {
  gdn_linear_argmax_args args{};
  args.rows = rows;
  args.n = spec_.vocab_size;
  args.k = spec_.hidden_size;
  args.x_dtype = GDN_F32;
  args.x_row_stride = spec_.hidden_size;
  args.norm_weight = weights_->final_norm;
  args.norm_eps = spec_.rms_norm_eps;
  args.weight = weights_->head;
  args.weight_dtype = GDN_BF16;
  return args;
}

absl::Status CudaHead::Logits(int64_t rows, const float* x, bool early_start) {
  gdn_linear_args args{};
  args.plan = plan_.get();
  args.rows = rows;
  args.x = x;
  args.x_dtype = GDN_F32;
  args.x_row_stride = spec_.hidden_size;
  args.norm_weight = weights_->final_norm;
  args.norm_eps = spec_.rms_norm_eps;
  args.weight = weights_->head;
  args.y = logits_.data();
  args.y_row_stride = spec_.vocab_size;
  args.early_start = early_start ? 1 : 0;
  return ops_->Run("head", gdn_linear, args);
}

absl::Status CudaHead::Sample(int64_t rows, const StepArrays& arrays, const CudaBatch* batch) {
  gdn_sampling_args args{};
  args.rows = rows;
  args.vocab = spec_.vocab_size;
  args.logits = logits_.data();
  args.logits_row_stride = spec_.vocab_size;
  args.params = arrays.params;
  args.position = arrays.position;
  if (batch != nullptr && batch->history_count > 0) {
    args.history = history_.data();
    args.history_offsets = history_offsets_.data();
  }
  args.token = arrays.token;
  args.logprob = arrays.logprob;
  if (batch != nullptr && batch->top_width > 0) {
    args.top_logprobs = batch->top_width;
    args.top_ids = top_ids_.data();
    args.top_values = top_values_.data();
  }
  return ops_->Run("sample", gdn_sample, args);
}

absl::Status CudaHead::RunDense(int64_t rows, const StepArrays& arrays, const float* x) {
  GDN_RETURN_IF_ERROR(Logits(rows, x, !ops_->timing()));
  return Sample(rows, arrays, nullptr);
}

absl::Status CudaHead::RunGreedy(int64_t rows, const StepArrays& arrays, const float* x) {
  gdn_linear_argmax_args args = GreedyArgs(rows);
  args.x = x;
  args.position = arrays.position;
  args.token = arrays.token;
  args.logprob = arrays.logprob;
  args.early_start = ops_->timing() ? 0 : 1;
  return ops_->Run("head", gdn_linear_argmax, args);
}

absl::Status CudaHead::SendChoiceInputs(const CudaBatch& batch) {
  cudaStream_t stream = ops_->stream();
  const auto rows = static_cast<int64_t>(batch.plan.logits_tokens.size());
  GDN_RETURN_IF_ERROR(Copy(logits_tokens_.data(), batch.logits_tokens.data(), rows,
                           cudaMemcpyHostToDevice, stream));
  if (batch.history_count == 0) return absl::OkStatus();
  // Freeing the smaller buffers waits for the steps in flight that may use them.
  GDN_RETURN_IF_ERROR(history_.Grow(batch.history_count, "cannot allocate token histories"));
  GDN_RETURN_IF_ERROR(history_offsets_.Grow(max_rows_ + 1, "cannot allocate token histories"));
  GDN_RETURN_IF_ERROR(Copy(history_.data(), batch.history.data(), batch.history_count,
                           cudaMemcpyHostToDevice, stream));
  return Copy(history_offsets_.data(), batch.history_offsets.data(), batch.plan.num_sampled + 1,
              cudaMemcpyHostToDevice, stream);
}

absl::Status CudaHead::FetchAlternatives(CudaBatch* batch) {
  const int64_t count = batch->plan.num_sampled * batch->top_width;
  if (count == 0) return absl::OkStatus();
  GDN_RETURN_IF_ERROR(batch->top_ids.Grow(count, "cannot allocate pinned memory for a batch"));
  GDN_RETURN_IF_ERROR(batch->top_values.Grow(count, "cannot allocate pinned memory for a batch"));
  GDN_RETURN_IF_ERROR(
      Copy(batch->top_ids.data(), top_ids_.data(), count, cudaMemcpyDeviceToHost, ops_->stream()));
  return Copy(batch->top_values.data(), top_values_.data(), count, cudaMemcpyDeviceToHost,
              ops_->stream());
}

absl::Status CudaHead::Run(CudaBatch* batch, const StepArrays& arrays, const float* x) {
  const auto rows = static_cast<int64_t>(batch->plan.logits_tokens.size());
  if (rows == 0) return absl::OkStatus();
  if (batch->top_width > kMaxTopLogprobs) {
    return absl::InvalidArgumentError(
        absl::StrCat("top_logprobs must be at most ", kMaxTopLogprobs, ", got ", batch->top_width));
  }
  const int64_t vocab = spec_.vocab_size;
  GDN_RETURN_IF_ERROR(SendChoiceInputs(*batch));
  if (batch->any_logits) {
    GDN_RETURN_IF_ERROR(
        batch->logits.Grow(rows * vocab, "cannot allocate pinned memory for logits"));
  }
  // Rows that choose come first and fit into the first part.
  for (int64_t first = 0; first < rows; first += max_rows_) {
    const int64_t count = std::min(max_rows_, rows - first);
    GDN_RETURN_IF_ERROR(ops_->Section("gather"));
    GDN_RETURN_IF_ERROR(GatherRows(x, logits_tokens_.data() + first, count, spec_.hidden_size,
                                   gathered_.data(), ops_->stream()));
    GDN_RETURN_IF_ERROR(Logits(count, gathered_.data(), false));
    if (first == 0 && batch->plan.num_sampled > 0) {
      GDN_RETURN_IF_ERROR(Sample(batch->plan.num_sampled, arrays, batch));
      GDN_RETURN_IF_ERROR(FetchAlternatives(batch));
    }
    if (batch->any_logits) {
      GDN_RETURN_IF_ERROR(ops_->Section("step_io"));
      GDN_RETURN_IF_ERROR(Copy(batch->logits.data() + first * vocab, logits_.data(), count * vocab,
                               cudaMemcpyDeviceToHost, ops_->stream()));
    }
  }
  return absl::OkStatus();
}

}  // namespace gdn::pipeline
