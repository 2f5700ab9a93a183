// The training ops around the rule on a GPU: gated RMSNorm forward and backward, the backward of
// the L2 norm, of the convolution and of the gates, GDN2's too. Microseconds a call with a cold L2,
// beside copies measured in the same run.
//
// Calls rotate over as many sets of buffers as exceed four times the L2; a CUDA graph holds one
// call a set, and every figure is the median over its replays, divided by the calls. Bytes are
// those that a call must move, each input and output once. `% copy` is against a kernel that copies
// as many bytes (half read, half written) in the same way, `% peak` against one that copies 2 GiB.
//
// `unsummed`: us where what adds up the blocks' partial sums, in their fixed order, does not run.
// What determinism costs is at most the difference: other sums would take time as well.
//
// usage: norm_bench [--replays=11] [--rows=32,65536,...] [--dims=64,128,256]
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "gdn/kernels/gdn_kernels.h"
#include "kernels/bench/cuda_bench.h"

namespace {

using gdn::bench::FillUniform;
using gdn::bench::GraphTimer;
using gdn::bench::Must;
using gdn::bench::Numbers;
using gdn::bench::ParseOptions;

template <int kVectors, int kThreads>
__global__ void __launch_bounds__(kThreads) Copy(const uint4* from, uint4* to, int64_t count) {
  const int64_t first = blockIdx.x * int64_t{kVectors * kThreads} + threadIdx.x;
  uint4 value[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (first + i * kThreads < count) value[i] = from[first + i * kThreads];
  }
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (first + i * kThreads < count) to[first + i * kThreads] = value[i];
  }
}

// One allocation, from which every case takes its buffers anew.
class Arena {
 public:
  explicit Arena(size_t bytes) : bytes_(bytes) { Must(cudaMalloc(&base_, bytes), "allocation"); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() { cudaFree(base_); }
  void Reset() { used_ = 0; }
  template <typename T>
  T* Take(int64_t count) {
    T* const taken = reinterpret_cast<T*>(base_ + used_);
    used_ += (static_cast<size_t>(count) * sizeof(T) + 255) / 256 * 256;
    if (used_ > bytes_) gdn::bench::Die("arena", "too small for this case");
    return taken;
  }
  // BF16 values: a case before may have left anything.
  uint16_t* TakeHalves(int64_t count, float low, float high) {
    uint16_t* const taken = Take<uint16_t>(count);
    FillUniform<<<4096, 256>>>(taken, count, low, high);
    Must(cudaGetLastError(), "fill");
    return taken;
  }
  float* TakeFloats(int64_t count, float low, float high) {
    float* const taken = Take<float>(count);
    FillUniform<<<4096, 256>>>(taken, count, low, high);
    Must(cudaGetLastError(), "fill");
    return taken;
  }

 private:
  char* base_ = nullptr;
  size_t bytes_;
  size_t used_ = 0;
};

struct Options {
  int replays = 11;
  std::vector<int64_t> rows = {32, 4096, 65536, 262144, 1048576};
  std::vector<int64_t> dims = {64, 128, 256};
};

class Bench {
 public:
  explicit Bench(const Options& options) : options_(options), arena_(size_t{24} << 30) {
    cudaDeviceProp properties;
    Must(cudaGetDeviceProperties(&properties, 0), "device");
    l2_bytes_ = properties.l2CacheSize;
    exec_.backend = GDN_BACKEND_CUDA;
    exec_.stream = timer_.stream();
    peak_ = 4e-6 * kGiB / CopyTime(4 * kGiB, 1);
    std::printf("%s, %d multiprocessors; copy of 2 GiB %.3f TB/s\n", properties.name,
                properties.multiProcessorCount, peak_);
  }

  void Run() {
    std::printf("%-34s %9s %8s %7s %7s %7s %9s\n", "case", "rows", "us", "TB/s", "% copy", "% peak",
                "unsummed");
    for (const int64_t dim : options_.dims) {
      for (const int64_t rows : options_.rows) {
        Norm(rows, dim);
        std::fflush(stdout);
      }
    }
    Conv(8, 4096, 8192);
    Conv(1, 32768, 8192);
    Gates(32768, 32);
    Gdn2Gates(32768, 32, 128, 4096);
    std::fflush(stdout);
  }

 private:
  static constexpr double kGiB = 1073741824.0;

  // A copy that moves this many bytes in all, the fastest of four.
  double CopyTime(double bytes, int sets) {
    arena_.Reset();
    const auto count = static_cast<int64_t>(bytes / 2 / sizeof(uint4));
    uint4* const from = arena_.Take<uint4>(count * sets);
    uint4* const to = arena_.Take<uint4>(count * sets);
    return std::min(
        {CopyTime<2, 128>(from, to, count, sets), CopyTime<4, 128>(from, to, count, sets),
         CopyTime<1, 256>(from, to, count, sets), CopyTime<4, 256>(from, to, count, sets)});
  }
  template <int kVectors, int kThreads>
  double CopyTime(const uint4* from, uint4* to, int64_t count, int sets) {
    constexpr int64_t kBlock = kVectors * kThreads;
    const auto grid = static_cast<unsigned>((count + kBlock - 1) / kBlock);
    return timer_.MicrosecondsEach(options_.replays, sets, [&](int set) {
      Copy<kVectors, kThreads>
          <<<grid, kThreads, 0, timer_.stream()>>>(from + set * count, to + set * count, count);
    });
  }

  int Sets(double bytes) const {
    return static_cast<int>(std::clamp(4.0 * l2_bytes_ / bytes + 1.0, 2.0, 256.0));
  }

  void Report(const std::string& name, int64_t rows, double bytes, double us, double copy_us) {
    std::printf("%-34s %9lld %8.2f %7.3f %7.1f %7.1f", name.c_str(), static_cast<long long>(rows),
                us, 1e-6 * bytes / us, 100.0 * copy_us / us, 100.0 * 1e-6 * bytes / us / peak_);
  }

  // `make(set)` takes a set's buffers and returns its call; `sums` names the kernel that adds up
  // partial sums, if the call has one.
  void Case(const std::string& name, int64_t rows, double bytes,
            const std::function<std::function<gdn_status()>(int)>& make,
            const char* sums = nullptr) {
    const int sets = Sets(bytes);
    if (copies_.count(bytes) == 0) copies_[bytes] = CopyTime(bytes, sets);
    arena_.Reset();
    std::vector<std::function<gdn_status()>> calls;
    for (int set = 0; set < sets; ++set) calls.push_back(make(set));
    Must(cudaDeviceSynchronize(), "inputs");
    const auto call = [&](int set) { Must(calls[static_cast<size_t>(set)]()); };
    Report(name, rows, bytes, timer_.MicrosecondsEach(options_.replays, sets, call),
           copies_[bytes]);
    if (sums != nullptr) {
      std::printf(" %9.2f", timer_.MicrosecondsEach(options_.replays, sets, call, sums));
    }
    std::printf("\n");
  }

  // `shift`: elements that the gate is moved from where 16 bytes begin.
  gdn_gated_rms_norm_input Input(int64_t rows, int64_t dim, bool strided, gdn_dtype gate_dtype,
                                 int64_t shift = 0) {
    gdn_gated_rms_norm_input in{};
    in.heads = std::min<int64_t>(rows, 32);
    in.batch = 1;
    in.seq = rows / in.heads;
    in.dim = dim;
    in.x = arena_.TakeHalves(rows * dim, -2.0f, 2.0f);
    in.x_dtype = GDN_BF16;
    in.x_strides = {rows * dim, in.heads * dim, dim, 1};
    // Beside q, k, v and the gates' columns, as in a layer's projection.
    const int64_t width = strided ? 3 * in.heads * dim + 64 : in.heads * dim;
    in.gate_dtype = gate_dtype;
    in.gate = gate_dtype == GDN_F32
                  ? static_cast<void*>(arena_.TakeFloats(in.seq * width, -3.0f, 3.0f))
                  : arena_.TakeHalves(in.seq * width, -3.0f, 3.0f);
    if (strided) in.gate = static_cast<const uint16_t*>(in.gate) + 2 * in.heads * dim + shift;
    in.gate_strides = {in.seq * width, width, dim, 1};
    in.gamma = arena_.TakeFloats(dim, 0.5f, 1.5f);
    in.gamma_dtype = GDN_F32;
    in.activation = GDN_GATE_SILU;
    return in;
  }

  void Forward(const char* name, int64_t rows, int64_t dim, bool strided, gdn_fp8_scaling fp8,
               bool amax, int64_t shift = 0) {
    const double bytes = static_cast<double>(rows) * (dim * (fp8 == GDN_FP8_NONE ? 6.0 : 5.0) +
                                                      4.0 + (fp8 == GDN_FP8_ROW ? 4.0 : 0.0));
    Case(Name(name, dim), rows, bytes, [&](int) {
      gdn_gated_rms_norm_forward_args args{};
      args.in = Input(rows, dim, strided, GDN_BF16, shift);
      args.eps = 1e-6f;
      args.y = arena_.Take<uint16_t>(rows * dim);
      args.rstd = arena_.Take<float>(rows);
      args.fp8 = fp8;
      args.fp8_scale = arena_.TakeFloats(1, 50.0f, 60.0f);
      args.fp8_scale_inv = arena_.Take<float>(rows);
      if (amax) args.amax = arena_.Take<float>(1);
      return [this, args] { return gdn_gated_rms_norm_forward(&exec_, &args); };
    });
  }

  void Backward(const char* name, int64_t rows, int64_t dim, bool strided, int64_t shift = 0) {
    const double bytes = static_cast<double>(rows) * (dim * 10.0 + 4.0);
    const auto make = [&](int) {
      gdn_gated_rms_norm_backward_args args{};
      args.in = Input(rows, dim, strided, GDN_BF16, shift);
      args.rstd = arena_.TakeFloats(rows, 0.5f, 1.5f);
      args.dy = arena_.TakeHalves(rows * dim, -1.0f, 1.0f);
      args.dy_strides = args.in.x_strides;
      args.dx = arena_.Take<uint16_t>(rows * dim);
      args.dgate = arena_.Take<uint16_t>(rows * dim);
      args.dgamma = arena_.Take<float>(dim);
      gdn_exec exec = exec_;
      Must(gdn_gated_rms_norm_backward_workspace(&exec, &args, &exec.workspace_bytes));
      exec.workspace = arena_.Take<char>(static_cast<int64_t>(exec.workspace_bytes));
      return [exec, args] { return gdn_gated_rms_norm_backward(&exec, &args); };
    };
    Case(Name(name, dim), rows, bytes, make, "SumTiles");
  }

  void L2(int64_t rows, int64_t dim) {
    Case(Name("l2 norm forward", dim), rows, static_cast<double>(rows) * (dim * 4.0 + 4.0),
         [&](int) {
           gdn_l2_norm_args args{};
           args.rows = rows;
           args.dim = args.x_row_stride = args.y_row_stride = dim;
           args.x = arena_.TakeHalves(rows * dim, -2.0f, 2.0f);
           args.y = arena_.Take<uint16_t>(rows * dim);
           args.x_dtype = args.y_dtype = GDN_BF16;
           args.rstd = arena_.Take<float>(rows);
           args.eps = 1e-6f;
           args.scale = 1.0f;
           return [this, args] { return gdn_l2_norm(&exec_, &args); };
         });
    Case(Name("l2 norm backward", dim), rows, static_cast<double>(rows) * (dim * 6.0 + 4.0),
         [&](int) {
           gdn_l2_norm_backward_args args{};
           args.rows = rows;
           args.dim = args.y_row_stride = args.dy_row_stride = args.dx_row_stride = dim;
           args.y = arena_.TakeHalves(rows * dim, -0.2f, 0.2f);
           args.dy = arena_.TakeHalves(rows * dim, -1.0f, 1.0f);
           args.dx = arena_.Take<uint16_t>(rows * dim);
           args.y_dtype = args.dy_dtype = args.dx_dtype = GDN_BF16;
           args.rstd = arena_.TakeFloats(rows, 0.5f, 1.5f);
           args.scale = 1.0f;
           return [this, args] { return gdn_l2_norm_backward(&exec_, &args); };
         });
  }

  void Norm(int64_t rows, int64_t dim) {
    Forward("forward", rows, dim, false, GDN_FP8_NONE, false);
    Forward("forward, strided gate", rows, dim, true, GDN_FP8_NONE, false);
    if (dim == 128) {
      Forward("forward, gate on 8 bytes", rows, dim, true, GDN_FP8_NONE, false, 4);
      Forward("forward, gate on 2 bytes", rows, dim, true, GDN_FP8_NONE, false, 1);
      Forward("forward, amax", rows, dim, false, GDN_FP8_NONE, true);
      Forward("forward, FP8 row scale", rows, dim, false, GDN_FP8_ROW, false);
      Forward("forward, FP8 row scale, amax", rows, dim, false, GDN_FP8_ROW, true);
    }
    Forward("forward, FP8 static scale", rows, dim, false, GDN_FP8_STATIC, false);
    Backward("backward", rows, dim, false);
    Backward("backward, strided gate", rows, dim, true);
    if (dim != 128) return;
    Backward("backward, gate on 8 bytes", rows, dim, true, 4);
    Backward("backward, gate on 2 bytes", rows, dim, true, 1);
    L2(rows, dim);
  }

  void Conv(int64_t sequences, int64_t length, int64_t channels) {
    const int64_t tokens = sequences * length;
    std::vector<int32_t> host;
    for (int64_t i = 0; i <= sequences; ++i) host.push_back(static_cast<int32_t>(i * length));
    const std::string name =
        "conv backward " + std::to_string(sequences) + "x" + std::to_string(length);
    const auto make = [&](int) {
      gdn_causal_conv_backward_args args{};
      int32_t* const cu = arena_.Take<int32_t>(sequences + 1);
      Must(cudaMemcpy(cu, host.data(), host.size() * sizeof(int32_t), cudaMemcpyHostToDevice),
           "upload");
      args.sequences = sequences;
      args.cu_seqlens = cu;
      args.channels = channels;
      args.width = 4;
      args.silu = 1;
      args.x = arena_.TakeHalves(tokens * channels, -1.0f, 1.0f);
      args.x_dtype = args.d_y_dtype = args.d_x_dtype = GDN_BF16;
      args.x_token_stride = args.d_y_token_stride = args.d_x_token_stride = channels;
      args.weight = arena_.TakeFloats(channels * 4, -0.5f, 0.5f);
      args.d_y = arena_.TakeHalves(tokens * channels, -1.0f, 1.0f);
      args.d_x = arena_.Take<uint16_t>(tokens * channels);
      args.d_weight = arena_.Take<float>(channels * 4);
      gdn_exec exec = exec_;
      Must(gdn_causal_conv_backward_workspace(&exec, &args, &exec.workspace_bytes));
      exec.workspace = arena_.Take<char>(static_cast<int64_t>(exec.workspace_bytes));
      return [exec, args] { return gdn_causal_conv_backward(&exec, &args); };
    };
    const double bytes = static_cast<double>(tokens) * channels * 6.0;
    Case(Name(name, channels), tokens, bytes, make, "SumPartials");
  }

  void Gates(int64_t tokens, int64_t heads) {
    const auto count = tokens * heads;
    const auto make = [&](int) {
      gdn_gates_backward_args args{};
      args.tokens = tokens;
      args.value_heads = heads;
      args.a = arena_.TakeHalves(count, -3.0f, 3.0f);
      args.b = arena_.TakeHalves(count, -3.0f, 3.0f);
      args.dtype = GDN_BF16;
      args.a_token_stride = args.b_token_stride = args.d_a_token_stride = args.d_b_token_stride =
          heads;
      args.a_log = arena_.TakeFloats(heads, 0.0f, 2.0f);
      args.dt_bias = arena_.TakeFloats(heads, -4.0f, -1.0f);
      args.beta_scale = 1.0f;
      args.d_g = arena_.TakeFloats(count, -1.0f, 1.0f);
      args.d_beta = arena_.TakeFloats(count, -1.0f, 1.0f);
      args.d_a = arena_.Take<uint16_t>(count);
      args.d_b = arena_.Take<uint16_t>(count);
      args.d_a_log = arena_.Take<float>(heads);
      args.d_dt_bias = arena_.Take<float>(heads);
      gdn_exec exec = exec_;
      Must(gdn_gates_backward_workspace(&exec, &args, &exec.workspace_bytes));
      exec.workspace = arena_.Take<char>(static_cast<int64_t>(exec.workspace_bytes));
      return [exec, args] { return gdn_gates_backward(&exec, &args); };
    };
    Case(Name("gates backward", heads), tokens, static_cast<double>(count) * 16.0, make,
         "SumPartials");
  }

  void Gdn2Gates(int64_t tokens, int64_t heads, int64_t key_dim, int64_t writes) {
    const int64_t channels = heads * key_dim;
    const auto make = [&](int) {
      gdn2_gates_backward_args args{};
      gdn2_gates_args& in = args.forward;
      in.tokens = tokens;
      in.gate_heads = heads;
      in.key_dim = key_dim;
      in.write_width = writes;
      in.f = arena_.TakeHalves(tokens * channels, -3.0f, 3.0f);
      in.b = arena_.TakeHalves(tokens * channels, -3.0f, 3.0f);
      in.w = arena_.TakeHalves(tokens * writes, -3.0f, 3.0f);
      in.fbw_dtype = GDN_BF16;
      in.f_token_stride = in.b_token_stride = channels;
      in.w_token_stride = writes;
      in.decay = GDN2_DECAY_SOFTPLUS;
      in.a_log = arena_.TakeFloats(heads, 0.0f, 2.0f);
      in.dt_bias = arena_.TakeFloats(channels, -4.0f, -1.0f);
      in.erase_scale = 1.0f;
      args.d_g = arena_.TakeFloats(tokens * channels, -1.0f, 1.0f);
      args.d_erase = arena_.TakeFloats(tokens * channels, -1.0f, 1.0f);
      args.d_write = arena_.TakeFloats(tokens * writes, -1.0f, 1.0f);
      args.d_f = arena_.Take<uint16_t>(tokens * channels);
      args.d_b = arena_.Take<uint16_t>(tokens * channels);
      args.d_w = arena_.Take<uint16_t>(tokens * writes);
      args.d_a_log = arena_.Take<float>(heads);
      args.d_dt_bias = arena_.Take<float>(channels);
      gdn_exec exec = exec_;
      Must(gdn_gdn2_gates_backward_workspace(&exec, &args, &exec.workspace_bytes));
      exec.workspace = arena_.Take<char>(static_cast<int64_t>(exec.workspace_bytes));
      return [exec, args] { return gdn_gdn2_gates_backward(&exec, &args); };
    };
    const double bytes = static_cast<double>(tokens) * (channels * 16.0 + writes * 8.0);
    Case(Name("gdn2 gates backward", channels), tokens, bytes, make, "SumPartials");
  }

  static std::string Name(const std::string& what, int64_t dim) {
    return what + ", " + std::to_string(dim);
  }

  Options options_;
  GraphTimer timer_;
  Arena arena_;
  gdn_exec exec_{};
  double l2_bytes_ = 0.0;
  double peak_ = 0.0;
  std::map<double, double> copies_;  // Microseconds by bytes.
};

}  // namespace

int main(int argc, char** argv) {
  Options options;
  ParseOptions(
      argc, argv,
      {{"--replays",
        [&](const std::string& value) { options.replays = std::max(1, std::stoi(value)); }},
       {"--rows", [&](const std::string& value) { options.rows = Numbers(value); }},
       {"--dims", [&](const std::string& value) { options.dims = Numbers(value); }}});
  Bench(options).Run();
  return 0;
}
