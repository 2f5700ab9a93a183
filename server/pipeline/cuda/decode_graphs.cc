#include "server/pipeline/cuda/decode_graphs.h"

#include <algorithm>

namespace gdn::pipeline {
namespace {

constexpr char kWhat[] = "cannot capture a decode step";

// Padding costs at most a third of a step's rows, beyond 16 rows a quarter.
std::vector<int64_t> PaddedSizes(int64_t max_rows) {
  std::vector<int64_t> sizes = {1, 2, 3, 4, 6, 8, 12, 16};
  for (int64_t step = 4; sizes.back() < max_rows; step *= 2) {
    for (int i = 0; i < 4; ++i) sizes.push_back(sizes.back() + step);
  }
  while (sizes.size() > 1 && sizes[sizes.size() - 2] >= max_rows) sizes.pop_back();
  sizes.back() = std::min(sizes.back(), max_rows);
  return sizes;
}

}  // namespace

absl::Status DecodeGraphs::Capture(int64_t max_rows, cudaStream_t stream,
                                   const std::function<absl::Status(int64_t)>& launch) {
  for (const int64_t rows : PaddedSizes(max_rows)) {
    GDN_RETURN_IF_ERROR(launch(rows));
    GDN_RETURN_IF_ERROR(CudaStatus(cudaStreamSynchronize(stream), kWhat));
    GDN_RETURN_IF_ERROR(
        CudaStatus(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), kWhat));
    const absl::Status launched = launch(rows);
    cudaGraph_t graph = nullptr;
    const cudaError_t ended = cudaStreamEndCapture(stream, &graph);
    GDN_RETURN_IF_ERROR(launched);
    GDN_RETURN_IF_ERROR(CudaStatus(ended, kWhat));
    size_t nodes = 0;
    GDN_RETURN_IF_ERROR(CudaStatus(cudaGraphGetNodes(graph, nullptr, &nodes), kWhat));
    cudaGraphExec_t exec = nullptr;
    const cudaError_t instantiated = cudaGraphInstantiate(&exec, graph, 0);
    (void)cudaGraphDestroy(graph);
    GDN_RETURN_IF_ERROR(CudaStatus(instantiated, kWhat));
    graphs_.push_back({rows, static_cast<int64_t>(nodes), CudaGraphExec(exec)});
    GDN_RETURN_IF_ERROR(CudaStatus(cudaGraphUpload(exec, stream), kWhat));
  }
  return absl::OkStatus();
}

int64_t DecodeGraphs::PaddedRows(int64_t rows) const {
  const auto fits = [](const Graph& graph, int64_t n) { return graph.rows < n; };
  const auto found = std::lower_bound(graphs_.begin(), graphs_.end(), rows, fits);
  return found == graphs_.end() ? -1 : found->rows;
}

std::vector<DecodeGraphs::Size> DecodeGraphs::Sizes() const {
  std::vector<Size> sizes;
  for (const Graph& graph : graphs_) sizes.push_back({graph.rows, graph.nodes});
  return sizes;
}

absl::Status DecodeGraphs::Launch(int64_t padded_rows, cudaStream_t stream) const {
  for (const Graph& graph : graphs_) {
    if (graph.rows != padded_rows) continue;
    return CudaStatus(cudaGraphLaunch(graph.exec.get(), stream), "cannot launch a decode step");
  }
  return absl::InternalError("no decode graph of this size");
}

}  // namespace gdn::pipeline
