#include "gdn/kernels/delta_rule_backward.h"

#include <algorithm>
#include <cmath>

#include "kernels/common/rule_args.h"
#include "kernels/cuda/delta_rule_backward_chunk.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/rule_backward_keys.cuh"
#include "kernels/cuda/rule_backward_walk.cuh"

namespace gdn::cuda {
namespace {

constexpr char kOp[] = "delta_rule_backward";

// The delta rule for the walk: one decay and one strength a token.
struct ScalarRule {
  struct Params {
    gdn_delta_rule_backward_args args;
    float scale;  // Never 0.
    int32_t ratio;
    walk::Scratch scratch;
  };
  static constexpr int kVectors = 2;  // d_q_hat, d_k_hat
  static constexpr int kScalars = 2;  // d_g but for its decay, d_beta

  template <int kPerLane>
  struct Sums {
    float vector[kVectors][kPerLane] = {};
    float scalar[kScalars] = {};
  };

  template <int kPerLane>
  struct Token {
    float q[kPerLane];
    float k[kPerLane];
    float decay;
    float beta;
    const Params& p;
    int64_t t;
    int64_t head;

    __device__ Token(const Params& params, int64_t token, int64_t value_head, int lane)
        : p(params), t(token), head(value_head) {
      const gdn_delta_rule_backward_args& a = p.args;
      const int64_t at = value_head / p.ratio * a.key_dim;
      const int K = static_cast<int>(a.key_dim);
      walk::LoadLanes(a.q, a.qkv_dtype, t * a.q_token_stride + at, K, lane, q);
      walk::LoadLanes(a.k, a.qkv_dtype, t * a.k_token_stride + at, K, lane, k);
      decay = expf(a.g[t * a.value_heads + head]);
      beta = a.beta[t * a.value_heads + head];
    }
    __device__ float Value(int row) const {
      const gdn_delta_rule_backward_args& a = p.args;
      return LoadAs(a.v, a.qkv_dtype, t * a.v_token_stride + head * a.value_dim + row);
    }

    // Returns v - S1 k.
    __device__ float Forward(int row, int rows, float (&s)[kPerLane]) const {
      if (row >= rows) return 0.0f;
      float predicted = 0.0f;
#pragma unroll
      for (int c = 0; c < kPerLane; ++c) {
        s[c] *= decay;
        predicted = fmaf(s[c], k[c], predicted);
      }
      const float error = Value(row) - LaneSum(predicted);
      const float u = beta * error;
#pragma unroll
      for (int c = 0; c < kPerLane; ++c) s[c] = fmaf(u, k[c], s[c]);
      return error;
    }

    __device__ void Backward(int row, int rows, float error, const float (&before)[kPerLane],
                             float (&d_s)[kPerLane], Sums<kPerLane>* sums) const {
      if (row >= rows) return;
      const gdn_delta_rule_backward_args& a = p.args;
      const float d_o =
          p.scale * LoadAs(a.d_o, a.d_o_dtype, t * a.d_o_token_stride + head * a.value_dim + row);
      const float u = beta * error;
      float d_u = 0.0f;
#pragma unroll
      for (int c = 0; c < kPerLane; ++c) {
        const float after = fmaf(u, k[c], decay * before[c]);
        sums->vector[0][c] = fmaf(after, d_o, sums->vector[0][c]);
        d_s[c] = fmaf(q[c], d_o, d_s[c]);
        d_u = fmaf(d_s[c], k[c], d_u);
      }
      d_u = LaneSum(d_u);
      const float d_predicted = -beta * d_u;
      float d_decay = 0.0f;
#pragma unroll
      for (int c = 0; c < kPerLane; ++c) {
        const float through_u = fmaf(d_s[c], u, sums->vector[1][c]);
        sums->vector[1][c] = fmaf(decay * before[c], d_predicted, through_u);
        d_s[c] = fmaf(k[c], d_predicted, d_s[c]);
        d_decay = fmaf(d_s[c], before[c], d_decay);
        d_s[c] *= decay;
      }
      sums->scalar[0] += d_decay;
      if (threadIdx.x % 32 == 0) {
        sums->scalar[1] = fmaf(d_u, error, sums->scalar[1]);
        StoreAs(a.d_v, a.d_qkv_dtype, t * a.d_v_token_stride + head * a.value_dim + row,
                beta * d_u);
      }
    }
  };

  template <typename T>
  static __device__ void AddScalar(const Params& p, int which, int64_t at, bool first,
                                   const T& token, float sum) {
    float* const to = (which == 0 ? p.args.d_g : p.args.d_beta) + at;
    const float value = which == 0 ? token.decay * sum : sum;
    *to = first ? value : *to + value;
  }
};

}  // namespace

size_t DeltaRuleBackwardWorkspace(const gdn_delta_rule_backward_args& args) {
  const size_t walk = walk::WorkspaceBytes(args, ScalarRule::kVectors);
  return MayCoverChunkedBackward(args) ? std::max(walk, ChunkedBackwardWorkspace(args)) : walk;
}

gdn_status DeltaRuleBackward(const gdn_exec& exec, const gdn_delta_rule_backward_args& args) {
  if (args.sequences == 0) return GDN_OK;
  Device device;
  if (const gdn_status status = CurrentDevice(kOp, &device); status != GDN_OK) return status;
  if (CoversChunkedBackward(device, args)) return LaunchChunkedBackward(exec, device, args);
  ScalarRule::Params params;
  params.args = args;
  params.scale = static_cast<float>(kernels::RuleScale(args.scale, args.key_dim));
  params.ratio = static_cast<int32_t>(args.value_heads / args.key_heads);
  params.scratch = walk::LayOut(args, exec.workspace);
  walk::Launch<ScalarRule>(params, Stream(exec));
  if (const gdn_status status = CheckLaunch(kOp); status != GDN_OK) return status;
  LaunchKeyGradients(QueryAndKeyGradients(args, params.scratch.partials), args.tokens,
                     Stream(exec));
  return CheckLaunch(kOp);
}

}  // namespace gdn::cuda
