// What a run of the stack on the device works on.
#ifndef SERVER_PIPELINE_CUDA_STACK_BATCH_H_
#define SERVER_PIPELINE_CUDA_STACK_BATCH_H_

#include <cstdint>

namespace gdn::pipeline {

// One-token rows first, longer sequences packed behind them.
struct StackBatch {
  int64_t step_rows = 0;
  int64_t prefills = 0;
  int64_t num_tokens = 0;               // Of both.
  const int32_t* cu_seqlens = nullptr;  // On the device, [prefills + 1].
};

}  // namespace gdn::pipeline

#endif  // SERVER_PIPELINE_CUDA_STACK_BATCH_H_
