// The linear op on a GPU: time per launch with a cold L2, beside the read ceiling of the device and
// cuBLASLt's best algorithm for the bare product, all measured in the same run.
//
// Every layer has its own weights; a CUDA graph holds one call per layer, and a figure is the
// median over its replays divided by the calls. GB/s counts the weights alone, once per call; the
// head also in its greedy form (linear_argmax). Last, the four products of a layer in a chain, as a
// decode step has them, with norms in kernels of their own and split between the products.
//
// usage: linear_cuda_bench [--rows=1,4,...] [--shapes=in,out,gate_up,down,head] [--no-lt]
//                          [--invariant] [--replays=20] [--chain-only] [--no-chain]
//                          [--split-norms]
#include <cublasLt.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "gdn/kernels/linear.h"
#include "gdn/kernels/linear_argmax.h"
#include "kernels/bench/cuda_bench.h"

namespace {

using gdn::bench::FillUniform;
using gdn::bench::ForEach;
using gdn::bench::GraphTimer;
using gdn::bench::Must;
using gdn::bench::Numbers;
using gdn::bench::ParseOptions;

void Must(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  gdn::bench::Die(what, cublasLtGetStatusString(status));
}

// The read ceiling: a block takes its share with all loads of a round in flight.
template <int kThreads, int kVectors>
__global__ void __launch_bounds__(kThreads) Read(const uint4* data, uint32_t* sink) {
  const uint4* tile = data + blockIdx.x * int64_t{kThreads * kVectors} + threadIdx.x;
  uint4 v[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) v[i] = __ldcg(tile + i * kThreads);
  uint32_t sum = 0;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) sum += v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
  if (sum == 0x12345678u) *sink = sum;  // Hardly ever; the loads must not vanish.
}

struct Product {
  const char* name;
  gdn_linear_kind kind;
  int64_t n;
  int64_t k;
  bool norm;  // x is then FP32.
  bool residual;
  bool f32_y;
  int layers;
};
const Product kProducts[] = {
    {"in", GDN_LINEAR_PLAIN, 8224, 1024, true, false, false, 24},
    {"out", GDN_LINEAR_PLAIN, 1024, 2048, false, true, true, 64},
    {"gate_up", GDN_LINEAR_SILU_MUL, 7168, 1024, true, false, false, 24},
    {"down", GDN_LINEAR_PLAIN, 1024, 3584, false, true, true, 40},
    {"head", GDN_LINEAR_PLAIN, 248320, 1024, true, false, true, 2},
};

struct Options {
  std::vector<int64_t> rows = {1, 4, 16, 64, 256};
  std::vector<std::string> shapes = {"in", "out", "gate_up", "down", "head"};
  bool lt = true;
  bool invariant = false;
  bool singles = true;
  bool chain = true;
  bool split_norms = false;  // Of the single products, where they take them.
  int replays = 20;
};

class Bench {
 public:
  explicit Bench(const Options& options) : options_(options) {
    Must(cublasLtCreate(&lt_), "cublasLtCreate");
    Must(cudaMalloc(&weights_, kPoolBytes), "weights");
    FillUniform<<<2048, 256, 0, stream_>>>(weights_, kPoolBytes / 2, -0.05f, 0.05f);
    Must(cudaMalloc(&norm_weight_, kMaxK * 4), "norm weight");
    FillUniform<<<8, 256, 0, stream_>>>(norm_weight_, kMaxK, -1.0f, 1.0f);
    Must(cudaMalloc(&workspace_, kWorkspaceBytes), "workspace");
    FillUniform<<<2048, 256, 0, stream_>>>(static_cast<uint16_t*>(workspace_), kWorkspaceBytes / 2,
                                           0.0f, 1.0f);
    Must(cudaMalloc(&positions_, kMostArgmaxRows * 8), "positions");
    Must(cudaMemsetAsync(positions_, 0, kMostArgmaxRows * 8, stream_), "positions");
    const int64_t max_rows = *std::max_element(options.rows.begin(), options.rows.end());
    Must(cudaMalloc(&x32_, max_rows * kMaxK * 4), "x");
    FillUniform<<<256, 256, 0, stream_>>>(x32_, max_rows * kMaxK, -1.0f, 1.0f);
    Must(cudaMalloc(&x16_, max_rows * 8224 * 2), "x");
    FillUniform<<<256, 256, 0, stream_>>>(x16_, max_rows * 8224, -1.0f, 1.0f);
    Must(cudaMalloc(&y_, max_rows * 248320 * 4), "y");
    Must(cudaMemsetAsync(y_, 0, max_rows * 248320 * 4, stream_), "y");
    Must(cudaStreamSynchronize(stream_), "fill");
  }

  void Run() {
    Ceiling();
    if (options_.singles) {
      std::printf("\n%-8s %5s | %9s %9s %9s %7s | %9s %9s\n", "product", "rows", "us", "early us",
                  "GB/s", "% read", "lt us", "lt GB/s");
      for (const Product& product : kProducts) {
        if (std::find(options_.shapes.begin(), options_.shapes.end(), product.name) ==
            options_.shapes.end()) {
          continue;
        }
        for (const int64_t rows : options_.rows) Single(product, rows);
        if (std::string(product.name) == "head") {
          for (const int64_t rows : options_.rows) Argmax(product, rows);
        }
      }
    }
    if (options_.chain) {
      std::printf("\nin, out, gate_up, down of 24 layers\n%5s | %9s %9s %9s %7s\n", "rows",
                  "us/layer", "split us", "GB/s", "% read");
      for (const int64_t rows : options_.rows) Chain(rows);
    }
  }

 private:
  static constexpr int64_t kPoolBytes = int64_t{1200} << 20;
  static constexpr int64_t kMaxK = 4096;
  static constexpr int64_t kMostArgmaxRows = 256;
  static constexpr size_t kWorkspaceBytes = size_t{256} << 20;

  // Median microseconds of a replay of what `enqueue` puts into a graph.
  double Time(const std::function<void()>& enqueue, int replays) {
    return timer_.Microseconds(replays, enqueue);
  }

  template <int kThreads, int kVectors>
  double TimeRead() {
    const int64_t vectors = kPoolBytes / 16;
    return Time(
        [&] {
          Read<kThreads, kVectors>
              <<<static_cast<unsigned>(vectors / (kThreads * kVectors)), kThreads, 0, stream_>>>(
                  reinterpret_cast<const uint4*>(weights_), reinterpret_cast<uint32_t*>(y_));
        },
        options_.replays);
  }
  void Ceiling() {
    const double us = std::min({TimeRead<256, 4>(), TimeRead<256, 8>(), TimeRead<512, 4>(),
                                TimeRead<512, 8>(), TimeRead<1024, 4>(), TimeRead<256, 16>()});
    read_ = kPoolBytes / us * 1e-3;
    std::printf("read ceiling %.0f GB/s over %lld MiB\n", read_,
                static_cast<long long>(kPoolBytes >> 20));
  }

  gdn_linear_plan* Plan(const Product& product, int64_t rows) const {
    gdn_linear_shape shape{};
    shape.kind = product.kind;
    shape.n = product.n;
    shape.k = product.k;
    shape.weight_dtype = GDN_BF16;
    shape.y_dtype = product.f32_y ? GDN_F32 : GDN_BF16;
    shape.accumulate = product.residual;
    shape.batch_invariant = options_.invariant;
    shape.max_rows = rows;
    gdn_linear_plan* plan = nullptr;
    Must(gdn_linear_plan_create(GDN_BACKEND_CUDA, &shape, &plan));
    return plan;
  }
  gdn_linear_args Args(const Product& product, const gdn_linear_plan* plan, int64_t rows) const {
    gdn_linear_args args{};
    args.plan = plan;
    args.rows = rows;
    args.x = product.norm ? static_cast<const void*>(x32_) : x16_;
    args.x_dtype = product.norm ? GDN_F32 : GDN_BF16;
    args.x_row_stride = product.k;
    args.norm_weight = product.norm ? norm_weight_ : nullptr;
    args.norm_eps = 1e-6f;
    args.y = y_;
    args.y_row_stride = product.kind == GDN_LINEAR_SILU_MUL ? product.n / 2 : product.n;
    return args;
  }
  gdn_exec Exec() const {
    gdn_exec exec{};
    exec.backend = GDN_BACKEND_CUDA;
    exec.stream = stream_;
    exec.workspace = workspace_;
    exec.workspace_bytes = kWorkspaceBytes;
    return exec;
  }

  // With `behind` for what a split norm passes from product to product.
  void SplitNorm(const Product& product, int64_t rows, char* behind, gdn_linear_args* args) const {
    if (product.norm) {
      args->x = behind;
      args->x_dtype = GDN_BF16;
      args->norm_weight = nullptr;
      args->squares = reinterpret_cast<const float*>(behind + rows * product.k * 2);
    } else {
      args->after_norm = norm_weight_;
      args->after_n = behind;
      args->after_squares = reinterpret_cast<float*>(behind + rows * product.n * 2);
    }
  }

  void Single(const Product& product, int64_t rows) {
    gdn_linear_plan* const plan = Plan(product, rows);
    const gdn_exec exec = Exec();
    const bool split = options_.split_norms && gdn_linear_splits_norm(plan, rows) != 0;
    // Behind what a product may need of the workspace.
    char* const behind = static_cast<char*>(workspace_) + kWorkspaceBytes / 2;
    double us[2];
    for (const int early : {0, 1}) {
      const auto enqueue = [&] {
        gdn_linear_args args = Args(product, plan, rows);
        args.early_start = early;
        if (split && (product.norm || product.residual)) SplitNorm(product, rows, behind, &args);
        for (int layer = 0; layer < product.layers; ++layer) {
          args.weight = weights_ + layer * product.n * product.k;
          Must(gdn_linear(&exec, &args));
        }
      };
      us[early] = Time(enqueue, options_.replays) / product.layers;
    }
    gdn_linear_plan_destroy(plan);
    const double bytes = 2.0 * static_cast<double>(product.n * product.k);
    const double lt = options_.lt ? BestLt(product, rows) : 0.0;
    const double best = std::min(us[0], us[1]);
    std::printf("%-8s %5lld | %9.2f %9.2f %9.0f %7.1f | %9.2f %9.0f\n", product.name,
                static_cast<long long>(rows), us[0], us[1], bytes / best * 1e-3,
                100e-3 * bytes / best / read_, lt, lt > 0.0 ? bytes / lt * 1e-3 : 0.0);
    std::fflush(stdout);
  }

  // The head that chooses greedily and keeps no logits.
  void Argmax(const Product& product, int64_t rows) {
    gdn_linear_argmax_args args{};
    args.rows = rows;
    args.n = product.n;
    args.k = product.k;
    args.x = x32_;
    args.x_dtype = GDN_F32;
    args.x_row_stride = product.k;
    args.norm_weight = norm_weight_;
    args.norm_eps = 1e-6f;
    args.weight_dtype = GDN_BF16;
    args.position = positions_;
    args.token = reinterpret_cast<int32_t*>(y_);
    args.logprob = y_ + rows;
    const gdn_exec exec = Exec();
    size_t bytes = 0;
    if (gdn_linear_argmax_workspace(&exec, &args, &bytes) != GDN_OK) return;
    double us[2];
    for (const int early : {0, 1}) {
      args.early_start = early;
      const auto enqueue = [&] {
        for (int layer = 0; layer < product.layers; ++layer) {
          args.weight = weights_ + layer * product.n * product.k;
          Must(gdn_linear_argmax(&exec, &args));
        }
      };
      us[early] = Time(enqueue, options_.replays) / product.layers;
    }
    const double weight_bytes = 2.0 * static_cast<double>(product.n * product.k);
    const double best = std::min(us[0], us[1]);
    std::printf("%-8s %5lld | %9.2f %9.2f %9.0f %7.1f |\n", "argmax", static_cast<long long>(rows),
                us[0], us[1], weight_bytes / best * 1e-3, 100e-3 * weight_bytes / best / read_);
    std::fflush(stdout);
  }

  // The bare product on rows that are normed and rounded already, no gate; the sum with y is kept.
  double BestLt(const Product& product, int64_t rows) {
    cublasLtMatmulDesc_t operation = nullptr;
    Must(cublasLtMatmulDescCreate(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "operation");
    const cublasOperation_t transposed = CUBLAS_OP_T;
    Must(cublasLtMatmulDescSetAttribute(operation, CUBLASLT_MATMUL_DESC_TRANSA, &transposed,
                                        sizeof(transposed)),
         "operation");
    cublasLtMatrixLayout_t a = nullptr;
    cublasLtMatrixLayout_t b = nullptr;
    cublasLtMatrixLayout_t c = nullptr;
    const auto u = [](int64_t value) { return static_cast<uint64_t>(value); };
    Must(cublasLtMatrixLayoutCreate(&a, CUDA_R_16BF, u(product.k), u(product.n), product.k), "a");
    Must(cublasLtMatrixLayoutCreate(&b, CUDA_R_16BF, u(product.k), u(rows), product.k), "b");
    Must(cublasLtMatrixLayoutCreate(&c, product.f32_y ? CUDA_R_32F : CUDA_R_16BF, u(product.n),
                                    u(rows), product.n),
         "c");
    cublasLtMatmulPreference_t preference = nullptr;
    Must(cublasLtMatmulPreferenceCreate(&preference), "preference");
    const uint64_t limit = uint64_t{32} << 20;
    Must(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                              &limit, sizeof(limit)),
         "preference");
    cublasLtMatmulHeuristicResult_t found[6] = {};
    int count = 0;
    Must(cublasLtMatmulAlgoGetHeuristic(lt_, operation, a, b, c, c, preference, 6, found, &count),
         "heuristic");
    double best = 1e30;
    const float alpha = 1.0f;
    const float beta = product.residual ? 1.0f : 0.0f;
    for (int i = 0; i < count; ++i) {
      const double us =
          Time(
              [&] {
                for (int layer = 0; layer < product.layers; ++layer) {
                  Must(cublasLtMatmul(lt_, operation, &alpha,
                                      weights_ + layer * product.n * product.k, a, x16_, b, &beta,
                                      y_, c, y_, c, &found[i].algo, workspace_, limit, stream_),
                       "matmul");
                }
              },
              std::max(3, options_.replays / 4)) /
          product.layers;
      best = std::min(best, us);
    }
    Must(cublasLtMatmulPreferenceDestroy(preference), "destroy");
    for (cublasLtMatrixLayout_t layout : {a, b, c}) {
      Must(cublasLtMatrixLayoutDestroy(layout), "destroy");
    }
    Must(cublasLtMatmulDescDestroy(operation), "destroy");
    return best;
  }

  // With split norms where the products take them.
  void Chain(int64_t rows) {
    constexpr int kLayers = 24;
    gdn_linear_plan* plans[4];
    int64_t bytes = 0;
    bool split = true;
    for (int i = 0; i < 4; ++i) {
      plans[i] = Plan(kProducts[i], rows);
      bytes += kProducts[i].n * kProducts[i].k * 2;
      split = split && gdn_linear_splits_norm(plans[i], rows) != 0;
    }
    const gdn_exec exec = Exec();
    uint16_t* const projected = reinterpret_cast<uint16_t*>(y_);
    // Behind what a product may need of the workspace.
    char* const behind = static_cast<char*>(workspace_) + kWorkspaceBytes / 2;
    double us[2];
    for (const int mode : {0, 1}) {  // Norms by kernels of their own, or split.
      us[mode] = 0.0;
      if (mode == 1 && !split) continue;
      const auto enqueue = [&] {
        const uint16_t* weight = weights_;
        for (int layer = 0; layer < kLayers; ++layer) {
          for (int i = 0; i < 4; ++i) {
            const Product& product = kProducts[i];
            gdn_linear_args args = Args(product, plans[i], rows);
            args.weight = weight;
            weight += product.n * product.k;
            if (product.norm) {
              args.y = projected;
            } else {
              args.x = projected;
              args.x_row_stride = i == 1 ? 8224 : 3584;
              args.y = x32_;
            }
            if (mode == 1) SplitNorm(product, rows, behind, &args);
            args.early_start = 1;
            Must(gdn_linear(&exec, &args));
          }
        }
      };
      us[mode] = Time(enqueue, options_.replays) / kLayers;
    }
    const double best = split ? std::min(us[0], us[1]) : us[0];
    std::printf("%5lld | %9.2f %9.2f %9.0f %7.1f\n", static_cast<long long>(rows), us[0], us[1],
                static_cast<double>(bytes) / best * 1e-3,
                100e-3 * static_cast<double>(bytes) / best / read_);
    std::fflush(stdout);
    for (gdn_linear_plan* plan : plans) gdn_linear_plan_destroy(plan);
  }

  const Options options_;
  const GraphTimer timer_;
  cudaStream_t const stream_ = timer_.stream();
  cublasLtHandle_t lt_ = nullptr;
  uint16_t* weights_ = nullptr;
  float* norm_weight_ = nullptr;
  float* x32_ = nullptr;
  uint16_t* x16_ = nullptr;
  float* y_ = nullptr;
  void* workspace_ = nullptr;
  int64_t* positions_ = nullptr;
  double read_ = 0.0;
};

Options Parse(int argc, char** argv) {
  Options options;
  ParseOptions(
      argc, argv,
      {{"--rows", [&](const std::string& value) { options.rows = Numbers(value); }},
       {"--shapes",
        [&](const std::string& value) {
          options.shapes.clear();
          ForEach(value, [&](const std::string& s) { options.shapes.push_back(s); });
        }},
       {"--no-lt", [&](const std::string&) { options.lt = false; }},
       {"--invariant", [&](const std::string&) { options.invariant = true; }},
       {"--chain-only", [&](const std::string&) { options.singles = false; }},
       {"--split-norms", [&](const std::string&) { options.split_norms = true; }},
       {"--no-chain", [&](const std::string&) { options.chain = false; }},
       {"--replays", [&](const std::string& value) { options.replays = std::stoi(value); }}});
  return options;
}

}  // namespace

int main(int argc, char** argv) {
  Bench(Parse(argc, argv)).Run();
  return 0;
}
