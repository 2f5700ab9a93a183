// The first batches, before anybody waits for one.
#include <algorithm>
#include <span>

#include "server/engine/engine_impl.h"

namespace gdn::engine {

absl::Status EngineImpl::WarmUp() {
  const pipeline::PipelineInfo& info = pipeline_->info();
  const auto tokens =
      static_cast<size_t>(std::min(options_.prefill_chunk_tokens, options_.max_input_tokens));
  const std::vector<int32_t> ids(info.has_embedding ? tokens : 0, 0);
  const std::vector<float> rows(
      info.has_embedding ? 0 : tokens * static_cast<size_t>(info.hidden_size), 0.0f);
  const pipeline::SampleSpec sample;
  std::vector<pipeline::SequenceOutput> outputs;
  Lock lock(mu_);
  AcquirePipeline(lock);
  lock.unlock();
  absl::Status status;
  // A prompt, then one token after it.
  for (const size_t length : {tokens, size_t{1}}) {
    pipeline::SequenceInput input;
    input.read_slot = 0;
    input.write_slot = 0;
    input.fresh = length == tokens;
    input.tokens = std::span(ids).first(std::min(length, ids.size()));
    input.hidden = std::span(rows).first(
        std::min(length * static_cast<size_t>(info.hidden_size), rows.size()));
    if (info.has_head) input.sample = &sample;
    status = pipeline_->Run(std::span(&input, 1), &outputs);
    if (status.ok() && (outputs.size() != 1 || !outputs[0].finite)) {
      status = absl::DataLossError(
          "the model gives NaN or infinity on the warm-up input; check its weights");
    }
    if (!status.ok()) break;
  }
  lock.lock();
  ReleasePipeline();
  return status;
}

}  // namespace gdn::engine
