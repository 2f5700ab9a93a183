#include "gdn/kernels/delta_rule.h"

#include <cmath>

#include "kernels/common/rule_args.h"
#include "kernels/cuda/delta_rule_chunk.h"
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/math.cuh"

// The rule as a recurrence over a sequence's tokens, for the step and for those prefills that the
// chunked kernel does not cover: correct, though token by token. A warp keeps kRows rows of a
// head's state in registers, a lane every 32nd column of them, and needs nothing of the other rows.

namespace gdn::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kRows = 4;
constexpr int kMaxPerLane = 256 / 32;  // K <= 256.

struct Params {
  gdn_delta_rule_args args;
  float scale;    // Never 0.
  int32_t ratio;  // HV / H.
  int32_t step;   // Non-zero: token i belongs to sequence i.
};

// One head of q or k, normalised on request, then scaled.
template <typename X>
__device__ inline void LoadKey(const X* from, int dim, int lane, bool norm, float scale,
                               float (&out)[kMaxPerLane]) {
  float sum = 0.0f;
#pragma unroll
  for (int c = 0; c < kMaxPerLane; ++c) {
    out[c] = lane + 32 * c < dim ? Widen(from[lane + 32 * c]) : 0.0f;
    sum = fmaf(out[c], out[c], sum);
  }
  const float factor = norm ? rsqrtf(LaneSum(sum) + kQkNormEps) * scale : scale;
#pragma unroll
  for (int c = 0; c < kMaxPerLane; ++c) out[c] *= factor;
}

template <typename X, typename S>
__global__ void __launch_bounds__(kThreads) Kernel(const __grid_constant__ Params p) {
  const gdn_delta_rule_args& a = p.args;
  const int K = static_cast<int>(a.key_dim);
  const int V = static_cast<int>(a.value_dim);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int first_row =
      (static_cast<int>(blockIdx.y) * kWarps + static_cast<int>(threadIdx.x) / 32) * kRows;
  if (first_row >= V) return;
  const int64_t units = a.sequences * a.value_heads;
  for (int64_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const int64_t i = unit / a.value_heads;
    const int64_t head = unit % a.value_heads;
    const int64_t key_head = head / p.ratio;
    const int64_t begin = p.step != 0 ? i : a.cu_seqlens[i];
    const int64_t end = p.step != 0 ? i + 1 : a.cu_seqlens[i + 1];
    const int64_t read = a.read_index[i];
    const int64_t write = a.write_index[i];
    const bool fresh = a.fresh != nullptr && a.fresh[i] != 0;
    if (read < 0 || write < 0) {
      for (int64_t t = begin; t < end; ++t) {
        if (lane < kRows && first_row + lane < V) {
          StoreAs(a.o, a.o_dtype, t * a.o_token_stride + head * V + first_row + lane, 0.0f);
        }
      }
      continue;
    }
    if (begin == end && read == write) continue;
    const int64_t offset = (head * V + first_row) * K + lane;
    const S* const from = static_cast<const S*>(a.state) + read * a.state_slot_stride + offset;
    S* const to = static_cast<S*>(a.state) + write * a.state_slot_stride + offset;
    float s[kRows][kMaxPerLane];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int c = 0; c < kMaxPerLane; ++c) {
        const bool inside = first_row + r < V && lane + 32 * c < K;
        s[r][c] = inside && !fresh ? Widen(from[r * K + 32 * c]) : 0.0f;
      }
    }
    for (int64_t t = begin; t < end; ++t) {
      float q[kMaxPerLane];
      float k[kMaxPerLane];
      const bool norm = a.use_qk_l2norm != 0;
      LoadKey(static_cast<const X*>(a.q) + t * a.q_token_stride + key_head * K, K, lane, norm,
              p.scale, q);
      LoadKey(static_cast<const X*>(a.k) + t * a.k_token_stride + key_head * K, K, lane, norm, 1.0f,
              k);
      const float decay = expf(a.g[t * a.value_heads + head]);
      const float beta = a.beta[t * a.value_heads + head];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (first_row + r < V) {
          float predicted = 0.0f;
#pragma unroll
          for (int c = 0; c < kMaxPerLane; ++c) {
            s[r][c] *= decay;
            predicted = fmaf(s[r][c], k[c], predicted);
          }
          const int64_t row = head * V + first_row + r;
          const float v = Widen(static_cast<const X*>(a.v)[t * a.v_token_stride + row]);
          const float u = beta * (v - LaneSum(predicted));
          float o = 0.0f;
#pragma unroll
          for (int c = 0; c < kMaxPerLane; ++c) {
            s[r][c] = fmaf(u, k[c], s[r][c]);
            o = fmaf(s[r][c], q[c], o);
          }
          o = LaneSum(o);
          if (lane == 0) StoreAs(a.o, a.o_dtype, t * a.o_token_stride + row, o);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int c = 0; c < kMaxPerLane; ++c) {
        if (first_row + r < V && lane + 32 * c < K) to[r * K + 32 * c] = Narrow<S>(s[r][c]);
      }
    }
  }
}

template <typename X>
void Launch(const Params& params, cudaStream_t stream) {
  const gdn_delta_rule_args& a = params.args;
  const dim3 grid(GridFor(a.sequences * a.value_heads, 1),
                  static_cast<unsigned>((a.value_dim + kWarps * kRows - 1) / (kWarps * kRows)));
  if (a.state_dtype == GDN_F32) {
    Kernel<X, float><<<grid, kThreads, 0, stream>>>(params);
  } else {
    Kernel<X, Bf16><<<grid, kThreads, 0, stream>>>(params);
  }
}

gdn_status Run(const char* op, const gdn_exec& exec, const gdn_delta_rule_args& args, bool step) {
  if (args.sequences == 0) return GDN_OK;
  Device device;
  if (const gdn_status status = CurrentDevice(op, &device); status != GDN_OK) return status;
  if (!step && CoversChunked(device, args)) return LaunchChunked(exec, device, args);
  Params params;
  params.args = args;
  params.scale = static_cast<float>(kernels::RuleScale(args.scale, args.key_dim));
  params.ratio = static_cast<int32_t>(args.value_heads / args.key_heads);
  params.step = step ? 1 : 0;
  switch (args.qkv_dtype) {
    case GDN_F32:
      Launch<float>(params, Stream(exec));
      break;
    case GDN_BF16:
      Launch<Bf16>(params, Stream(exec));
      break;
    case GDN_F16:
      Launch<F16>(params, Stream(exec));
      break;
  }
  return CheckLaunch(op);
}

}  // namespace

gdn_status DeltaRuleStep(const gdn_exec& exec, const gdn_delta_rule_args& args) {
  return Run("delta_rule_step", exec, args, /*step=*/true);
}

gdn_status DeltaRulePrefill(const gdn_exec& exec, const gdn_delta_rule_args& args) {
  return Run("delta_rule_prefill", exec, args, /*step=*/false);
}

}  // namespace gdn::cuda
