// File: cuda_pipeline.h
//
// The pipeline on an NVIDIA GPU. Products in BF16 with FP32 sums and an FP32 residual stream; steps
// of one token a row run as captured graphs, and two batches may be in flight.
#ifndef SERVER_PIPELINE_CUDA_CUDA_PIPELINE_H_
#define SERVER_PIPELINE_CUDA_CUDA_PIPELINE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "gdn/kernels/types.h"
#include "server/model/weights.h"
#include "server/pipeline/cuda/decode_graphs.h"
#include "server/pipeline/pipeline.h"

namespace gdn::pipeline {

struct CudaOptions {
  int32_t device_index = 0;
  // One algorithm per product for every batch size: a sequence's bits do not depend on the batch it
  // shares.
  bool batch_invariant = false;
  gdn_dtype state_type = GDN_F32;  // GDN_F32 or GDN_BF16.
  int64_t num_slots = 0;           // 0: as many as fit, at most DeviceStatePool::kMaxAutoSlots.
  int64_t max_rows = 64;           // Sequences of a batch.
  int64_t max_step_tokens = 1024;  // Tokens of a batch.
  // Of each phase the first batch and every so many after it have their ops timed one by one,
  // which costs them their graph. 0: never.
  int64_t timed_interval = 256;
};

// What loading has found and done, for the log.
struct CudaReport {
  std::string device_name;
  int64_t weight_bytes = 0;
  double upload_bytes_per_second = 0;
  int64_t state_bytes = 0;
  int64_t free_bytes = 0;  // Of device memory, afterwards.
  int64_t num_graphs = 0;
  std::vector<DecodeGraphs::Size> graph_sizes;
  std::vector<DecodeGraphs::Size> greedy_graph_sizes;  // Of steps whose rows are all greedy.
};

// Loads the weights (whose host memory is then let go), allocates the state pool and everything
// else a step needs, and captures the graphs. FAILED_PRECONDITION: no usable device.
// RESOURCE_EXHAUSTED: the pool cannot fit, with the arithmetic. UNIMPLEMENTED: no kernel covers the
// model's dimensions. INVALID_ARGUMENT: an option is out of range.
absl::StatusOr<std::unique_ptr<Pipeline>> CreateCudaPipeline(model::Model model,
                                                             const CudaOptions& options,
                                                             CudaReport* report = nullptr);

}  // namespace gdn::pipeline

#endif  // SERVER_PIPELINE_CUDA_CUDA_PIPELINE_H_
