// How far the state of the fused decode step drifts from FP64 arithmetic over many steps: relative
// L2 of state and output of one head, with FP32 and with BF16 state, on the same rounded inputs.
//
// usage: drift_bench [steps, default 32768]
#include <cuda_runtime_api.h>

#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "gdn/kernels/fused_decode.h"

namespace {

constexpr int64_t kDim = 128;  // K and V.
constexpr int64_t kChannels = 3 * kDim;
constexpr int64_t kWidth = kChannels + kDim + 8;  // q|k|v|z|b|a, padded.
constexpr int64_t kConvWidth = 4;

[[noreturn]] void Die(const char* what, const char* why) {
  std::fprintf(stderr, "drift_bench: %s: %s\n", what, why);
  std::exit(1);
}
void Must(cudaError_t error) {
  if (error != cudaSuccess) Die("CUDA", cudaGetErrorString(error));
}

uint16_t ToBf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
float FromBf16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

template <typename T>
T* Upload(const std::vector<T>& host) {
  void* device = nullptr;
  Must(cudaMalloc(&device, host.size() * sizeof(T)));
  Must(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  return static_cast<T*>(device);
}

double RelativeL2(const std::vector<float>& a, const std::vector<float>& b) {
  double error = 0;
  double norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    error += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
    norm += double{b[i]} * b[i];
  }
  return std::sqrt(error / norm);
}

struct Problem {
  std::vector<uint16_t> x;
  std::vector<float> conv_weight, a_log, dt_bias, norm_weight;
  std::vector<int64_t> slot = {0};
};

Problem MakeProblem(int64_t steps, float step_size) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  Problem p;
  p.x.resize(static_cast<size_t>(steps * kWidth));
  for (uint16_t& value : p.x) value = ToBf16(normal(random));
  for (int64_t i = 0; i < kChannels * kConvWidth; ++i) {
    p.conv_weight.push_back(0.5f * normal(random));
  }
  p.norm_weight.assign(kDim, 1.0f);
  p.a_log = {0.0f};
  p.dt_bias = {std::log(std::expm1(step_size))};  // softplus of it is the step.
  return p;
}

gdn_fused_decode_args Args(gdn_dtype state_dtype) {
  gdn_fused_decode_args args{};
  args.rows = args.tokens = args.key_heads = args.value_heads = 1;
  args.key_dim = args.value_dim = kDim;
  args.conv_width = kConvWidth;
  args.dtype = GDN_BF16;
  args.x_token_stride = kWidth;
  args.k_offset = kDim;
  args.v_offset = 2 * kDim;
  args.z_offset = 3 * kDim;
  args.b_offset = 4 * kDim;
  args.a_offset = 4 * kDim + 1;
  args.beta_scale = 1.0f;
  args.use_qk_l2norm = 1;
  args.eps = 1e-6f;
  args.state_dtype = state_dtype;
  args.state_slot_stride = kDim * kDim;
  args.conv_slot_stride = (kConvWidth - 1) * kChannels;
  args.y_token_stride = kDim;
  return args;
}

// The state after `steps`, widened, and the last output.
struct Result {
  std::vector<float> state;
  std::vector<float> y;
};

void Step(const gdn_exec& exec, const gdn_fused_decode_args& args) {
  if (gdn_fused_decode(&exec, &args) != GDN_OK) Die("fused_decode", gdn_last_error());
}

std::vector<Result> OnReference(const Problem& p, const std::vector<int64_t>& marks) {
  std::vector<float> state(kDim * kDim);
  std::vector<uint16_t> conv((kConvWidth - 1) * kChannels);
  std::vector<uint16_t> y(kDim);
  gdn_fused_decode_args args = Args(GDN_F32);
  args.conv_weight = p.conv_weight.data();
  args.a_log = p.a_log.data();
  args.dt_bias = p.dt_bias.data();
  args.norm_weight = p.norm_weight.data();
  args.state = state.data();
  args.conv_state = conv.data();
  args.read_index = args.write_index = p.slot.data();
  args.y = y.data();
  const gdn_exec exec{};
  std::vector<Result> results;
  int64_t step = 0;
  for (const int64_t mark : marks) {
    for (; step < mark; ++step) {
      args.x = p.x.data() + step * kWidth;
      Step(exec, args);
    }
    Result& result = results.emplace_back();
    result.state = state;
    for (const uint16_t value : y) result.y.push_back(FromBf16(value));
  }
  return results;
}

std::vector<Result> OnDevice(const Problem& p, const std::vector<int64_t>& marks,
                             gdn_dtype state_dtype) {
  const std::vector<float> zeros(kDim * kDim);
  float* state = Upload(zeros);
  gdn_fused_decode_args args = Args(state_dtype);
  args.conv_weight = Upload(p.conv_weight);
  args.a_log = Upload(p.a_log);
  args.dt_bias = Upload(p.dt_bias);
  args.norm_weight = Upload(p.norm_weight);
  args.state = state;
  args.conv_state = Upload(std::vector<uint16_t>((kConvWidth - 1) * kChannels));
  args.read_index = args.write_index = Upload(p.slot);
  std::vector<uint16_t> y(kDim);
  uint16_t* device_y = Upload(y);
  args.y = device_y;
  const uint16_t* x = Upload(p.x);
  gdn_exec exec{};
  exec.backend = GDN_BACKEND_CUDA;
  std::vector<Result> results;
  int64_t step = 0;
  for (const int64_t mark : marks) {
    for (; step < mark; ++step) {
      args.x = x + step * kWidth;
      Step(exec, args);
    }
    Result& result = results.emplace_back();
    result.state.resize(kDim * kDim);
    Must(cudaMemcpy(y.data(), device_y, y.size() * 2, cudaMemcpyDeviceToHost));
    if (state_dtype == GDN_F32) {
      Must(cudaMemcpy(result.state.data(), state, result.state.size() * 4, cudaMemcpyDeviceToHost));
    } else {
      std::vector<uint16_t> halves(result.state.size());
      Must(cudaMemcpy(halves.data(), state, halves.size() * 2, cudaMemcpyDeviceToHost));
      for (size_t i = 0; i < halves.size(); ++i) result.state[i] = FromBf16(halves[i]);
    }
    for (const uint16_t value : y) result.y.push_back(FromBf16(value));
  }
  return results;
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t steps = argc > 1 ? std::atoll(argv[1]) : 32768;
  std::vector<int64_t> marks;
  for (int64_t mark = 32; mark < steps; mark *= 8) marks.push_back(mark);
  marks.push_back(steps);
  std::printf("%10s %8s | %12s %12s | %12s %12s\n", "decay", "steps", "f32 state", "f32 y",
              "bf16 state", "bf16 y");
  for (const float step_size : {0.001f, 0.1f}) {  // The range at the start of training.
    const Problem problem = MakeProblem(steps, step_size);
    const std::vector<Result> truth = OnReference(problem, marks);
    const std::vector<Result> f32 = OnDevice(problem, marks, GDN_F32);
    const std::vector<Result> bf16 = OnDevice(problem, marks, GDN_BF16);
    for (size_t i = 0; i < marks.size(); ++i) {
      std::printf("%10.4f %8lld | %12.3e %12.3e | %12.3e %12.3e\n", static_cast<double>(step_size),
                  static_cast<long long>(marks[i]), RelativeL2(f32[i].state, truth[i].state),
                  RelativeL2(f32[i].y, truth[i].y), RelativeL2(bf16[i].state, truth[i].state),
                  RelativeL2(bf16[i].y, truth[i].y));
    }
  }
  return 0;
}
