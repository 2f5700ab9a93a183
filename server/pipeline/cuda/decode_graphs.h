// File: decode_graphs.h
//
// A captured decode step per padded number of rows.
#ifndef SERVER_PIPELINE_CUDA_DECODE_GRAPHS_H_
#define SERVER_PIPELINE_CUDA_DECODE_GRAPHS_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "server/pipeline/cuda/device_memory.h"

namespace gdn::pipeline {

class DecodeGraphs {
 public:
  // `launch` puts a step of that many rows on the stream. It is called twice per size, the first
  // time for real: what a kernel's first launch does cannot be captured.
  absl::Status Capture(int64_t max_rows, cudaStream_t stream,
                       const std::function<absl::Status(int64_t rows)>& launch);

  // Rows of the smallest graph that holds `rows`.
  int64_t PaddedRows(int64_t rows) const;
  // Kernels, copies and fills of each graph.
  struct Size {
    int64_t rows;
    int64_t nodes;
  };
  std::vector<Size> Sizes() const;
  absl::Status Launch(int64_t padded_rows, cudaStream_t stream) const;
  int64_t size() const { return static_cast<int64_t>(graphs_.size()); }

 private:
  struct Graph {
    int64_t rows;
    int64_t nodes;
    CudaGraphExec exec;
  };
  std::vector<Graph> graphs_;  // By rows, ascending.
};

}  // namespace gdn::pipeline

#endif  // SERVER_PIPELINE_CUDA_DECODE_GRAPHS_H_
