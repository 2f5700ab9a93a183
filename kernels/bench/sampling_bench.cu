// The sampler on a GPU: time per call with cold logits, beside the copy ceiling of the device
// measured in the same run.
//
// Calls rotate over as many sets of logits as exceed four times the L2. A CUDA graph holds one call
// per set, and every figure is the median over its replays, divided by the calls. The share is that
// of the time in which the copy rate moves the logits once: what one pass at memory speed takes.
//
// usage: sampling_bench [--batches=1,64,256] [--vocab=248320] [--replays=20] [--json=FILE]
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "gdn/kernels/sampling.h"
#include "kernels/bench/cuda_bench.h"

namespace {

using gdn::bench::GraphTimer;
using gdn::bench::Must;
using gdn::bench::Numbers;
using gdn::bench::ParseOptions;

// About normal, from a hash of the position.
__global__ void FillNormal(float* data, int64_t count, float scale) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    float sum = 0.0f;
    uint64_t h = static_cast<uint64_t>(i);
    for (int j = 0; j < 3; ++j) {
      h = (h + 0x9e3779b97f4a7c15ull) * 0xbf58476d1ce4e5b9ull;
      h = (h ^ (h >> 27)) * 0x94d049bb133111ebull;
      h ^= h >> 31;
      sum += static_cast<float>(h & 0xffff) + static_cast<float>(h >> 16 & 0xffff) +
             static_cast<float>(h >> 32 & 0xffff) + static_cast<float>(h >> 48);
    }
    data[i] = scale * (sum / 65536.0f - 6.0f);
  }
}

__global__ void __launch_bounds__(512) Copy(const float4* from, float4* to) {
  const int64_t first = blockIdx.x * int64_t{512 * 4} + threadIdx.x;
  float4 v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = from[first + i * 512];
#pragma unroll
  for (int i = 0; i < 4; ++i) to[first + i * 512] = v[i];
}

struct Case {
  const char* name;
  gdn_sampling_params params;
  int32_t history;
  int32_t top_logprobs;
};
constexpr Case kCases[] = {
    {"greedy", {0.0f, 0, 1.0f, 0.0f, 1.0f, 1}, 0, 0},
    {"temperature", {1.0f, 0, 1.0f, 0.0f, 1.0f, 1}, 0, 0},
    {"top_k 50 + top_p 0.9", {1.0f, 50, 0.9f, 0.0f, 1.0f, 1}, 0, 0},
    {"top_p 0.9", {1.0f, 0, 0.9f, 0.0f, 1.0f, 1}, 0, 0},
    {"min_p 0.05", {1.0f, 0, 1.0f, 0.05f, 1.0f, 1}, 0, 0},
    {"greedy + penalty", {0.0f, 0, 1.0f, 0.0f, 1.1f, 1}, 1000, 0},
    {"greedy + 5 alternatives", {0.0f, 0, 1.0f, 0.0f, 1.0f, 1}, 0, 5},
};

class Bench {
 public:
  Bench(std::vector<int64_t> batches, int64_t vocab, int replays, const std::string& json)
      : batches_(std::move(batches)), vocab_(vocab), replays_(replays) {
    cudaDeviceProp properties;
    Must(cudaGetDeviceProperties(&properties, 0), "device");
    l2_bytes_ = properties.l2CacheSize;
    if (!json.empty()) json_ = std::fopen(json.c_str(), "w");
    std::printf("%s, vocabulary %lld\n", properties.name, static_cast<long long>(vocab_));
  }

  void Run() {
    MeasureCopy();
    std::printf("%-24s %6s %6s | %9s %7s\n", "case", "batch", "scale", "us", "% copy");
    // Logits of a flat and of a peaked distribution.
    for (const float scale : {1.0f, 3.0f}) {
      for (const int64_t batch : batches_) {
        for (const Case& c : kCases) Measure(c, batch, scale);
      }
    }
    if (json_ != nullptr) std::fclose(json_);
  }

 private:
  double Time(int calls, const std::function<void(int)>& call) {
    return timer_.MicrosecondsEach(replays_, calls, call);
  }

  void MeasureCopy() {
    constexpr int64_t kBytes = int64_t{1} << 30;
    char* data = nullptr;
    Must(cudaMalloc(&data, 2 * kBytes), "copy");
    FillNormal<<<2048, 256, 0, stream_>>>(reinterpret_cast<float*>(data), 2 * kBytes / 4, 1.0f);
    auto* from = reinterpret_cast<float4*>(data);
    const double us = Time(
        8, [&](int) { Copy<<<kBytes / 16 / 2048, 512, 0, stream_>>>(from, from + kBytes / 16); });
    copy_ = 2.0 * kBytes / us * 1e-6;
    std::printf("copy %.3f TB/s\n", copy_);
    Must(cudaFree(data), "free");
  }

  template <typename T>
  T* OnDevice(const std::vector<T>& values) {
    T* data = nullptr;
    Must(cudaMalloc(&data, values.size() * sizeof(T)), "array");
    Must(cudaMemcpy(data, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice),
         "array");
    owned_.push_back(data);
    return data;
  }

  void Measure(const Case& c, int64_t batch, float scale) {
    const int64_t size = batch * vocab_;
    const int64_t sets = std::max<int64_t>(2, 4 * l2_bytes_ / (size * 4) + 1);
    float* logits = nullptr;
    Must(cudaMalloc(&logits, sets * size * 4), "logits");
    owned_.push_back(logits);
    FillNormal<<<2048, 256, 0, stream_>>>(logits, sets * size, scale);
    std::vector<gdn_sampling_params> params(batch, c.params);
    std::vector<int64_t> position(batch);
    std::vector<int32_t> history;
    std::vector<int64_t> offsets = {0};
    for (int64_t row = 0; row < batch; ++row) {
      params[row].seed = static_cast<uint64_t>(row);
      position[row] = 1000 + row;
      for (int32_t i = 0; i < c.history; ++i)
        history.push_back(i * static_cast<int32_t>(vocab_ / c.history));
      offsets.push_back(static_cast<int64_t>(history.size()));
    }
    gdn_exec exec{};
    exec.backend = GDN_BACKEND_CUDA;
    exec.stream = stream_;
    gdn_sampling_args args{};
    args.rows = batch;
    args.vocab = vocab_;
    args.logits_row_stride = vocab_;
    args.params = OnDevice(params);
    args.position = OnDevice(position);
    if (c.history > 0) {
      args.history = OnDevice(history);
      args.history_offsets = OnDevice(offsets);
    }
    args.top_logprobs = c.top_logprobs;
    args.token = OnDevice(std::vector<int32_t>(batch));
    args.logprob = OnDevice(std::vector<float>(batch));
    if (c.top_logprobs > 0) {
      args.top_ids = OnDevice(std::vector<int32_t>(batch * c.top_logprobs));
      args.top_values = OnDevice(std::vector<float>(batch * c.top_logprobs));
    }
    Must(gdn_sample_workspace(&exec, &args, &exec.workspace_bytes));
    exec.workspace = OnDevice(std::vector<char>(exec.workspace_bytes));
    const int calls = static_cast<int>(std::clamp<int64_t>(sets, 8, 64));
    const double us = Time(calls, [&](int i) {
      args.logits = logits + i % sets * size;
      Must(gdn_sample(&exec, &args));
    });
    const double share = 100.0 * static_cast<double>(size) * 4e-6 / copy_ / us;
    std::printf("%-24s %6lld %6.1f | %9.2f %7.1f\n", c.name, static_cast<long long>(batch), scale,
                us, share);
    if (json_ != nullptr) {
      std::fprintf(json_,
                   "{\"case\": \"%s\", \"batch\": %lld, \"vocab\": %lld, \"scale\": %.1f, \"us\": "
                   "%.3f, \"copy_share\": %.4f, \"copy_tb_per_s\": %.4f}\n",
                   c.name, static_cast<long long>(batch), static_cast<long long>(vocab_), scale, us,
                   share / 100.0, copy_);
    }
    for (void* data : owned_) Must(cudaFree(data), "free");
    owned_.clear();
  }

  const std::vector<int64_t> batches_;
  const int64_t vocab_;
  const int replays_;
  const GraphTimer timer_;
  cudaStream_t const stream_ = timer_.stream();
  int64_t l2_bytes_ = 0;
  double copy_ = 0.0;
  std::FILE* json_ = nullptr;
  std::vector<void*> owned_;
};

}  // namespace

int main(int argc, char** argv) {
  std::vector<int64_t> batches = {1, 64, 256};
  int64_t vocab = 248320;
  int replays = 20;
  std::string json;
  ParseOptions(argc, argv,
               {{"--batches", [&](const std::string& value) { batches = Numbers(value); }},
                {"--vocab", [&](const std::string& value) { vocab = std::stoll(value); }},
                {"--replays", [&](const std::string& value) { replays = std::stoi(value); }},
                {"--json", [&](const std::string& value) { json = value; }}});
  Bench(batches, vocab, replays, json).Run();
  return 0;
}
