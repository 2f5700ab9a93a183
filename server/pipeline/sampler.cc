#include "server/pipeline/sampler.h"

#include <algorithm>

namespace gdn::pipeline {

absl::Status Sampler::Run(std::span<const SequenceInput> inputs, const BatchPlan& plan,
                          const float* logits) {
  if (plan.num_sampled == 0) return absl::OkStatus();
  const auto rows = static_cast<size_t>(plan.num_sampled);
  params_.clear();
  positions_.clear();
  history_.clear();
  history_offsets_.assign(1, 0);
  top_width_ = 0;
  // Inputs with a sample are numbered in input order, as their rows are.
  for (const SequenceInput& input : inputs) {
    if (input.sample == nullptr) continue;
    const SampleSpec& spec = *input.sample;
    params_.push_back(
        {spec.temperature, spec.top_k, spec.top_p, spec.min_p, spec.repetition_penalty, spec.seed});
    positions_.push_back(spec.position);
    history_.insert(history_.end(), spec.history.begin(), spec.history.end());
    history_offsets_.push_back(static_cast<int64_t>(history_.size()));
    top_width_ = std::max(top_width_, spec.top_logprobs);
  }
  top_width_ = static_cast<int32_t>(std::min<int64_t>(top_width_, vocab_size_));
  tokens_.resize(rows);
  logprobs_.resize(rows);
  top_ids_.resize(rows * static_cast<size_t>(top_width_));
  top_values_.resize(top_ids_.size());

  gdn_sampling_args args{};
  args.rows = plan.num_sampled;
  args.vocab = vocab_size_;
  args.logits = logits;
  args.logits_row_stride = vocab_size_;
  args.params = params_.data();
  args.position = positions_.data();
  args.history = history_.empty() ? nullptr : history_.data();
  args.history_offsets = history_.empty() ? nullptr : history_offsets_.data();
  args.top_logprobs = top_width_;
  args.token = tokens_.data();
  args.logprob = logprobs_.data();
  args.top_ids = top_width_ > 0 ? top_ids_.data() : nullptr;
  args.top_values = top_width_ > 0 ? top_values_.data() : nullptr;
  GDN_RETURN_IF_ERROR(ops_->Run("sample", gdn_sample, args, gdn_sample_workspace));

  top_.resize(top_ids_.size());
  for (size_t i = 0; i < top_.size(); ++i) top_[i] = {top_ids_[i], top_values_[i]};
  return absl::OkStatus();
}

TokenLogprob Sampler::token(int64_t row) const {
  return {tokens_[static_cast<size_t>(row)], logprobs_[static_cast<size_t>(row)]};
}

std::span<const TokenLogprob> Sampler::top(int64_t row, int32_t count) const {
  const auto width = static_cast<size_t>(top_width_);
  return std::span<const TokenLogprob>(top_).subspan(static_cast<size_t>(row) * width,
                                                     std::min(width, static_cast<size_t>(count)));
}

}  // namespace gdn::pipeline
