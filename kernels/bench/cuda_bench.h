// What the CUDA benchmarks share: errors that end the program, data made up on the device, and
// times of graph replays.
#ifndef KERNELS_BENCH_CUDA_BENCH_H_
#define KERNELS_BENCH_CUDA_BENCH_H_

#include <cuda_runtime_api.h>
#include <errno.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "gdn/kernels/types.h"

namespace gdn::bench {

[[noreturn]] inline void Die(const char* what, const char* why) {
  std::fprintf(stderr, "%s: %s: %s\n", program_invocation_short_name, what, why);
  std::exit(1);
}
inline void Must(cudaError_t error, const char* what) {
  if (error != cudaSuccess) Die(what, cudaGetErrorString(error));
}
inline void Must(gdn_status status) {
  if (status != GDN_OK) Die(gdn_status_string(status), gdn_last_error());
}

// Uniform in [low, high), from a hash of the position.
__device__ inline float Uniform(uint64_t i, float low, float high) {
  uint64_t h = (i + 0x9e3779b97f4a7c15ull) * 0xbf58476d1ce4e5b9ull;
  h = (h ^ (h >> 27)) * 0x94d049bb133111ebull;
  return low + (high - low) * static_cast<float>(h >> 40) * 0x1p-24f;
}

// T: float, or uint16_t for BF16.
template <typename T>
__global__ void FillUniform(T* data, int64_t count, float low, float high) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    const float x = Uniform(static_cast<uint64_t>(i), low, high);
    if constexpr (sizeof(T) == 2) {
      data[i] = static_cast<T>(__float_as_uint(x) >> 16);
    } else {
      data[i] = x;
    }
  }
}

// A stream, and the time that a graph of what is put on it takes.
class GraphTimer {
 public:
  GraphTimer() {
    Must(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
    Must(cudaEventCreate(&begin_), "event");
    Must(cudaEventCreate(&end_), "event");
  }
  GraphTimer(const GraphTimer&) = delete;
  GraphTimer& operator=(const GraphTimer&) = delete;
  cudaStream_t stream() const { return stream_; }

  // Median microseconds of a replay, after three that do not count; of kernels whose name contains
  // `without`, none runs, and what they would have made is not there.
  double Microseconds(int replays, const std::function<void()>& enqueue,
                      const char* without = nullptr) const {
    constexpr int kWarmUp = 3;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    Must(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "capture");
    enqueue();
    Must(cudaStreamEndCapture(stream_, &graph), "capture");
    Must(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
    if (without != nullptr) Disable(graph, executable, without);
    std::vector<float> times;
    for (int i = 0; i < replays + kWarmUp; ++i) {
      Must(cudaEventRecord(begin_, stream_), "record");
      Must(cudaGraphLaunch(executable, stream_), "launch");
      Must(cudaEventRecord(end_, stream_), "record");
      Must(cudaEventSynchronize(end_), "replay");
      float ms = 0.0f;
      Must(cudaEventElapsedTime(&ms, begin_, end_), "elapsed");
      if (i >= kWarmUp) times.push_back(ms);
    }
    Must(cudaGraphExecDestroy(executable), "destroy");
    Must(cudaGraphDestroy(graph), "destroy");
    const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
    std::nth_element(times.begin(), middle, times.end());
    return 1e3 * *middle;
  }
  // The same of one of `launches` launches in a graph.
  double MicrosecondsEach(int replays, int launches, const std::function<void(int)>& launch,
                          const char* without = nullptr) const {
    const auto all = [&] {
      for (int i = 0; i < launches; ++i) launch(i);
    };
    return Microseconds(replays, all, without) / launches;
  }

 private:
  static void Disable(cudaGraph_t graph, cudaGraphExec_t executable, const char* name) {
    size_t count = 0;
    Must(cudaGraphGetNodes(graph, nullptr, &count), "nodes");
    std::vector<cudaGraphNode_t> nodes(count);
    Must(cudaGraphGetNodes(graph, nodes.data(), &count), "nodes");
    bool found = false;
    for (const cudaGraphNode_t node : nodes) {
      cudaGraphNodeType type;
      Must(cudaGraphNodeGetType(node, &type), "node");
      if (type != cudaGraphNodeTypeKernel) continue;
      cudaKernelNodeParams kernel = {};
      Must(cudaGraphKernelNodeGetParams(node, &kernel), "kernel");
      const char* its_name = nullptr;
      Must(cudaFuncGetName(&its_name, kernel.func), "kernel's name");
      if (std::strstr(its_name, name) == nullptr) continue;
      Must(cudaGraphNodeSetEnabled(executable, node, 0), "disable");
      found = true;
    }
    if (!found) Die(name, "no such kernel in the graph");
  }

  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
};

// Device memory of a benchmark, of made up values if a range is given.
template <typename T>
class Buffer {
 public:
  explicit Buffer(int64_t count) : count_(count) {
    Must(cudaMalloc(&data_, static_cast<size_t>(count) * sizeof(T)), "allocation");
  }
  Buffer(int64_t count, float low, float high) : Buffer(count) {
    FillUniform<<<4096, 256>>>(data_, count_, low, high);
    Must(cudaGetLastError(), "fill");
  }
  explicit Buffer(const std::vector<T>& values) : Buffer(static_cast<int64_t>(values.size())) {
    Must(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice),
         "upload");
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { cudaFree(data_); }
  T* get() const { return data_; }
  std::vector<T> Download() const {
    std::vector<T> host(static_cast<size_t>(count_));
    Must(cudaMemcpy(host.data(), data_, host.size() * sizeof(T), cudaMemcpyDeviceToHost),
         "download");
    return host;
  }

 private:
  T* data_ = nullptr;
  int64_t count_;
};

// What an option does with its value: what follows `=`, empty without one.
using OptionAction = std::function<void(const std::string& value)>;

// A command line of --name and --name=value; ends the program at any other.
inline void ParseOptions(int argc, char** argv,
                         const std::map<std::string, OptionAction>& actions) {
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const size_t equals = std::min(argument.find('='), argument.size());
    const auto found = actions.find(argument.substr(0, equals));
    if (found == actions.end()) {
      std::fprintf(stderr, "%s: unknown option %s; see the head of its source\n",
                   program_invocation_short_name, argv[i]);
      std::exit(2);
    }
    found->second(argument.substr(std::min(equals + 1, argument.size())));
  }
}

// Calls `item` with each element of a comma-separated list.
inline void ForEach(const std::string& list, const std::function<void(const std::string&)>& item) {
  for (size_t begin = 0; begin <= list.size();) {
    const size_t end = std::min(list.find(',', begin), list.size());
    item(list.substr(begin, end - begin));
    begin = end + 1;
  }
}

inline std::vector<int64_t> Numbers(const std::string& list) {
  std::vector<int64_t> numbers;
  ForEach(list, [&](const std::string& item) { numbers.push_back(std::stoll(item)); });
  return numbers;
}
// Of a list like 16:32,16:48.
inline std::vector<std::pair<int64_t, int64_t>> Pairs(const std::string& list, char separator) {
  std::vector<std::pair<int64_t, int64_t>> pairs;
  ForEach(list, [&](const std::string& item) {
    pairs.emplace_back(std::stoll(item), std::stoll(item.substr(item.find(separator) + 1)));
  });
  return pairs;
}

}  // namespace gdn::bench

#endif  // KERNELS_BENCH_CUDA_BENCH_H_
