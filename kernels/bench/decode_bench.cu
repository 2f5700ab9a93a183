// The fused decode step on a GPU: time per launch with a cold L2, beside the ceilings of the device
// measured in the same run.
//
// Launches rotate over as many layers (states, convolution states, projections, weights, outputs)
// as exceed four times the L2; only the index arrays are shared, as the layers of one decode step
// share them. A CUDA graph holds one launch per layer, and every figure is the median over its
// replays, divided by the launches. Bytes are all that a launch must move: both states read and
// written, projections, weights, output.
//
// usage: decode_bench [--batches=1,4,...] [--heads=16:32,...] [--state=f32,bf16]
// [--tilings[=0,1,...]]
//                     [--early-start] [--in-order] [--tokens=1] [--replays=40] [--json=FILE]
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "gdn/kernels/fused_decode.h"
#include "kernels/bench/cuda_bench.h"
#include "kernels/cuda/decode_tiling.h"

namespace {

using gdn::bench::FillUniform;
using gdn::bench::ForEach;
using gdn::bench::GraphTimer;
using gdn::bench::Must;
using gdn::bench::Numbers;
using gdn::bench::Pairs;
using gdn::bench::ParseOptions;

constexpr int64_t kDim = 128;
constexpr int64_t kWidth = 4;
constexpr int kTileBytes = 65536;

// The read-modify-write ceilings. Each warp takes neighbouring bytes, with all loads in flight, and
// writes them back changed once its block has read its own. Blocks follow the slots of an index, as
// decode steps do: memory gives 3 % less where these are shuffled than where they lie in order.
constexpr int64_t kSlotBytes = int64_t{2} << 20;

template <int kWarps, int kVectors>
__global__ void __launch_bounds__(32 * kWarps)
    ReadModifyWrite(float4* data, const int64_t* __restrict__ slots) {
  constexpr int kBlockVectors = 32 * kWarps * kVectors;
  constexpr int kBlocks = kSlotBytes / 16 / kBlockVectors;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float4* part = data + slots[blockIdx.x / kBlocks] * (kSlotBytes / 16) +
                 int64_t{blockIdx.x % kBlocks} * kBlockVectors + warp * 32 * kVectors + lane;
  float4 v[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) v[i] = part[i * 32];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    v[i].x = v[i].x * 0.999f + 0.001f;
    v[i].y = v[i].y * 0.999f + 0.001f;
    v[i].z = v[i].z * 0.999f + 0.001f;
    v[i].w = v[i].w * 0.999f + 0.001f;
    part[i * 32] = v[i];
  }
}
template <int kThreads, int kVectors>
__global__ void __launch_bounds__(kThreads) Copy(const float4* from, float4* to) {
  const int64_t first = blockIdx.x * int64_t{kThreads * kVectors} + threadIdx.x;
  float4 v[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) v[i] = from[first + i * kThreads];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) to[first + i * kThreads] = v[i];
}
__global__ void Empty() {}

void Shuffle(std::vector<int64_t>& values) {
  uint64_t seed = 88172645463325252ull;
  for (size_t i = values.size() - 1; i > 0; --i) {
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    std::swap(values[i], values[seed % (i + 1)]);
  }
}

struct Options {
  std::vector<int64_t> batches = {1, 4, 16, 64, 256, 512};
  std::vector<std::pair<int64_t, int64_t>> heads = {{16, 32}};
  std::vector<gdn_dtype> states = {GDN_F32, GDN_BF16};
  bool all_tilings = false;
  std::vector<int> tilings;  // Instead of the one that the launcher chooses.
  bool early_start = false;
  bool in_order = false;  // The rows' slots; else shuffled.
  int64_t tokens = 1;
  int replays = 40;
  std::string json;
};

class Bench {
 public:
  explicit Bench(const Options& options) : options_(options) {
    cudaDeviceProp properties;
    Must(cudaGetDeviceProperties(&properties, 0), "device");
    l2_bytes_ = properties.l2CacheSize;
    if (!options.json.empty()) json_ = std::fopen(options.json.c_str(), "w");
    std::printf("%s, %d multiprocessors, %.0f MB L2\n", properties.name,
                properties.multiProcessorCount, static_cast<double>(l2_bytes_) / 1e6);
  }

  void Run() {
    Ceilings();
    std::printf("\n%-7s %5s %6s %6s | %9s %9s %7s %7s\n", "state", "H:HV", "batch", "tiling", "us",
                "TB/s", "% rmw", "% copy");
    for (const auto& [key_heads, value_heads] : options_.heads) {
      for (gdn_dtype state : options_.states) {
        for (int64_t batch : options_.batches) Decode(key_heads, value_heads, state, batch);
      }
    }
    if (json_ != nullptr) std::fclose(json_);
  }

 private:
  // Median microseconds of one of `launches` launches in a graph.
  double Time(int launches, const std::function<void(int)>& launch) {
    return timer_.MicrosecondsEach(options_.replays, launches, launch);
  }

  // How many layers of the given footprint exceed four times the L2, and launches per graph.
  int64_t Layers(int64_t bytes) const { return std::max<int64_t>(2, 4 * l2_bytes_ / bytes + 1); }
  static int Launches(int64_t layers) { return static_cast<int>(std::max<int64_t>(layers, 16)); }

  template <int kWarps, int kVectors>
  double TimeRmw(float4* data, int64_t bytes, int64_t layers, const int64_t* slots) {
    const int64_t vectors = bytes / 16;
    return Time(Launches(layers), [&](int i) {
      ReadModifyWrite<kWarps, kVectors>
          <<<static_cast<unsigned>(vectors / (32 * kWarps * kVectors)), 32 * kWarps, 0, stream_>>>(
              data + (i % layers) * vectors, slots);
    });
  }
  // The fastest of several shapes of the same read-modify-write of `bytes`, a multiple of a slot's.
  double BestRmw(float4* data, int64_t bytes, int64_t layers, bool shuffled) {
    std::vector<int64_t> order(bytes / kSlotBytes);
    std::iota(order.begin(), order.end(), 0);
    if (shuffled) Shuffle(order);
    int64_t* slots = nullptr;
    Must(cudaMalloc(&slots, order.size() * 8), "slots");
    Must(cudaMemcpyAsync(slots, order.data(), order.size() * 8, cudaMemcpyHostToDevice, stream_),
         "slots");
    const double best = std::min(
        {TimeRmw<1, 4>(data, bytes, layers, slots), TimeRmw<1, 8>(data, bytes, layers, slots),
         TimeRmw<4, 8>(data, bytes, layers, slots), TimeRmw<8, 8>(data, bytes, layers, slots),
         TimeRmw<16, 8>(data, bytes, layers, slots), TimeRmw<8, 16>(data, bytes, layers, slots)});
    Must(cudaFree(slots), "free");
    return best;
  }
  template <int kThreads, int kVectors>
  double TimeCopy(float4* data, int64_t bytes) {
    const int64_t vectors = bytes / 16;
    return Time(16, [&](int) {
      Copy<kThreads, kVectors>
          <<<static_cast<unsigned>(vectors / (kThreads * kVectors)), kThreads, 0, stream_>>>(
              data, data + vectors);
    });
  }

  void Ceilings() {
    constexpr int64_t kBytes = int64_t{1} << 30;
    char* data = nullptr;
    Must(cudaMalloc(&data, 2 * kBytes), "ceilings");
    FillUniform<<<2048, 256, 0, stream_>>>(reinterpret_cast<float*>(data), 2 * kBytes / 4, -1.0f,
                                           1.0f);
    float4* const vectors = reinterpret_cast<float4*>(data);
    const double copy =
        std::min({TimeCopy<256, 1>(vectors, kBytes), TimeCopy<256, 4>(vectors, kBytes),
                  TimeCopy<512, 4>(vectors, kBytes), TimeCopy<512, 8>(vectors, kBytes)});
    copy_ = 2.0 * kBytes / copy * 1e-6;
    const double in_order = 2.0 * kBytes / BestRmw(vectors, kBytes, 2, false) * 1e-6;
    rmw_ = 2.0 * kBytes / BestRmw(vectors, kBytes, 2, true) * 1e-6;
    const double empty = Time(100, [&](int) { Empty<<<1, 32, 0, stream_>>>(); });
    std::printf(
        "copy %.3f TB/s, in-place read-modify-write of shuffled slots %.3f TB/s, in order %.3f "
        "TB/s "
        "(1 GiB), empty kernel %.2f us\n",
        copy_, rmw_, in_order, empty);
    std::printf("in-place read-modify-write of one layer's FP32 states, HV 32, us:");
    for (int64_t batch : options_.batches) {
      const int64_t bytes = batch * 32 * kTileBytes;
      const int64_t layers = Layers(bytes);
      float4* states = vectors;
      float4* own = nullptr;
      if (layers * bytes > 2 * kBytes) {
        Must(cudaMalloc(&own, layers * bytes), "ceilings");
        FillUniform<<<2048, 256, 0, stream_>>>(reinterpret_cast<float*>(own), layers * bytes / 4,
                                               -1.0f, 1.0f);
        states = own;
      }
      std::printf(" %lld: %.2f", static_cast<long long>(batch),
                  BestRmw(states, bytes, layers, true));
      if (own != nullptr) Must(cudaFree(own), "free");
    }
    std::printf("\n");
    Must(cudaFree(data), "free");
  }

  void Decode(int64_t key_heads, int64_t value_heads, gdn_dtype state_dtype, int64_t batch) {
    const int64_t keys = key_heads * kDim;
    const int64_t values = value_heads * kDim;
    const int64_t channels = 2 * keys + values;
    const int64_t line = (channels + values + 2 * value_heads + 7) / 8 * 8;
    const int64_t lines = batch * options_.tokens;
    const int64_t state_size = batch * values * kDim;
    const int64_t conv_size = batch * (kWidth - 1) * channels;
    const int64_t element = state_dtype == GDN_F32 ? 4 : 2;
    const int64_t weights = channels * kWidth + 2 * value_heads + kDim;
    const int64_t bytes = 2 * state_size * element + 2 * conv_size * 2 +
                          lines * (channels + values + 2 * value_heads) * 2 + lines * values * 2 +
                          weights * 4;
    const int64_t layers = Layers(state_size * element + conv_size * 2);

    char* state = nullptr;
    uint16_t* conv = nullptr;
    uint16_t* x = nullptr;
    uint16_t* y = nullptr;
    float* weight = nullptr;
    int64_t* index = nullptr;
    Must(cudaMalloc(&state, layers * state_size * element), "state");
    Must(cudaMalloc(&conv, layers * conv_size * 2), "conv");
    Must(cudaMalloc(&x, layers * lines * line * 2), "x");
    Must(cudaMalloc(&y, layers * lines * values * 2), "y");
    const int64_t weight_stride = (weights + 3) / 4 * 4;
    Must(cudaMalloc(&weight, layers * weight_stride * 4), "weights");
    Must(cudaMalloc(&index, batch * 8), "index");
    if (state_dtype == GDN_F32) {
      FillUniform<<<2048, 256, 0, stream_>>>(reinterpret_cast<float*>(state), layers * state_size,
                                             -0.1f, 0.1f);
    } else {
      FillUniform<<<2048, 256, 0, stream_>>>(reinterpret_cast<uint16_t*>(state),
                                             layers * state_size, -0.1f, 0.1f);
    }
    FillUniform<<<2048, 256, 0, stream_>>>(conv, layers * conv_size, -1.0f, 1.0f);
    FillUniform<<<2048, 256, 0, stream_>>>(x, layers * lines * line, -1.0f, 1.0f);
    FillUniform<<<256, 256, 0, stream_>>>(weight, layers * weight_stride, -0.5f, 0.5f);
    std::vector<int64_t> slots(batch);
    std::iota(slots.begin(), slots.end(), 0);
    if (!options_.in_order) Shuffle(slots);
    Must(cudaMemcpyAsync(index, slots.data(), batch * 8, cudaMemcpyHostToDevice, stream_), "index");
    Must(cudaStreamSynchronize(stream_), "fill");

    gdn_exec exec{};
    exec.backend = GDN_BACKEND_CUDA;
    exec.stream = stream_;
    gdn_fused_decode_args args{};
    args.rows = batch;
    args.tokens = options_.tokens;
    args.key_heads = key_heads;
    args.value_heads = value_heads;
    args.key_dim = args.value_dim = kDim;
    args.conv_width = kWidth;
    args.dtype = GDN_BF16;
    args.x_token_stride = line;
    args.k_offset = keys;
    args.v_offset = 2 * keys;
    args.z_offset = channels;
    args.b_offset = channels + values;
    args.a_offset = args.b_offset + value_heads;
    args.beta_scale = 1.0f;
    args.use_qk_l2norm = 1;
    args.eps = 1e-6f;
    args.state_dtype = state_dtype;
    args.state_slot_stride = values * kDim;
    args.conv_slot_stride = (kWidth - 1) * channels;
    args.read_index = args.write_index = index;
    args.y_token_stride = values;
    args.early_start = options_.early_start ? 1 : 0;
    const auto run = [&](int i, int tiling) {
      const int64_t layer = i % layers;
      args.x = x + layer * lines * line;
      args.conv_weight = weight + layer * weight_stride;
      args.a_log = args.conv_weight + channels * kWidth;
      args.dt_bias = args.a_log + value_heads;
      args.norm_weight = args.dt_bias + value_heads;
      args.state = state + layer * state_size * element;
      args.conv_state = conv + layer * conv_size;
      args.y = y + layer * lines * values;
      Must(gdn::cuda::FusedDecodeWith(exec, args, tiling));
    };
    args.state = state;  // For the alignment that the choice looks at.
    args.x = x;
    args.conv_weight = weight;
    args.conv_state = conv;
    int chosen = -1;
    Must(gdn::cuda::ChooseDecodeTiling(args, &chosen));
    std::vector<int> tilings = {chosen};
    if (options_.all_tilings || !options_.tilings.empty()) {
      tilings.clear();
      for (int i = 0; i < gdn::cuda::kNumDecodeTilings; ++i) {
        const bool wanted = options_.all_tilings ||
                            std::find(options_.tilings.begin(), options_.tilings.end(), i) !=
                                options_.tilings.end();
        if (wanted && gdn::cuda::DecodeTilingCovers(i, value_heads / key_heads, options_.tokens)) {
          tilings.push_back(i);
        }
      }
    }
    for (int tiling : tilings) {
      const double us = Time(Launches(layers), [&](int i) { run(i, tiling); });
      const double rate = static_cast<double>(bytes) / us * 1e-6;
      const char* name = state_dtype == GDN_F32 ? "f32" : "bf16";
      std::printf("%-7s %2lld:%-2lld %6lld %5d%c | %9.2f %9.3f %7.1f %7.1f\n", name,
                  static_cast<long long>(key_heads), static_cast<long long>(value_heads),
                  static_cast<long long>(batch), tiling, tiling == chosen ? '*' : ' ', us, rate,
                  100.0 * rate / rmw_, 100.0 * rate / copy_);
      if (json_ != nullptr) {
        std::fprintf(json_,
                     "{\"state\": \"%s\", \"key_heads\": %lld, \"value_heads\": %lld, \"batch\": "
                     "%lld, \"tokens\": %lld, \"early_start\": %d, \"tiling\": %d, \"chosen\": %d, "
                     "\"us\": %.3f, \"bytes\": %lld, \"tb_per_s\": %.4f, \"rmw_tb_per_s\": %.4f, "
                     "\"copy_tb_per_s\": %.4f}\n",
                     name, static_cast<long long>(key_heads), static_cast<long long>(value_heads),
                     static_cast<long long>(batch), static_cast<long long>(options_.tokens),
                     args.early_start, tiling, tiling == chosen ? 1 : 0, us,
                     static_cast<long long>(bytes), rate, rmw_, copy_);
      }
    }
    for (void* pointer :
         {static_cast<void*>(state), static_cast<void*>(conv), static_cast<void*>(x),
          static_cast<void*>(y), static_cast<void*>(weight), static_cast<void*>(index)}) {
      Must(cudaFree(pointer), "free");
    }
  }

  const Options options_;
  const GraphTimer timer_;
  cudaStream_t const stream_ = timer_.stream();
  int64_t l2_bytes_ = 0;
  double copy_ = 0.0;
  double rmw_ = 0.0;
  std::FILE* json_ = nullptr;
};

Options Parse(int argc, char** argv) {
  Options options;
  ParseOptions(
      argc, argv,
      {{"--batches", [&](const std::string& value) { options.batches = Numbers(value); }},
       {"--heads", [&](const std::string& value) { options.heads = Pairs(value, ':'); }},
       {"--state",
        [&](const std::string& value) {
          options.states.clear();
          ForEach(value, [&](const std::string& s) {
            options.states.push_back(s == "f32" ? GDN_F32 : GDN_BF16);
          });
        }},
       {"--tilings",
        [&](const std::string& value) {
          options.all_tilings = value.empty();
          if (value.empty()) return;
          ForEach(value, [&](const std::string& s) { options.tilings.push_back(std::stoi(s)); });
        }},
       {"--early-start", [&](const std::string&) { options.early_start = true; }},
       {"--in-order", [&](const std::string&) { options.in_order = true; }},
       {"--tokens", [&](const std::string& value) { options.tokens = std::stoll(value); }},
       {"--replays", [&](const std::string& value) { options.replays = std::stoi(value); }},
       {"--json", [&](const std::string& value) { options.json = value; }}});
  return options;
}

}  // namespace

int main(int argc, char** argv) {
  Bench(Parse(argc, argv)).Run();
  return 0;
}
