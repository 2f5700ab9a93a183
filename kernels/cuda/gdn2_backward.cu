#include "gdn/kernels/gdn2_backward.h"

#include <cmath>

#include "kernels/common/rule_args.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/rule_backward_keys.cuh"
#include "kernels/cuda/rule_backward_walk.cuh"

namespace gdn::cuda {
namespace {

constexpr char kOp[] = "gdn2_backward";

// GDN2 for the walk: a decay and an erase gate for each key channel, a write gate for each value.
struct ChannelRule {
  struct Params {
    gdn2_backward_args args;
    float scale;  // Never 0.
    int32_t ratio;
    int32_t gate_ratio;  // Value heads to a gate head.
    walk::Scratch scratch;
  };
  static constexpr int kVectors = 4;  // d_q_hat, d_k_hat, d_g, d_erase
  static constexpr int kScalars = 0;

  template <int kPerLane>
  struct Sums {
    float vector[kVectors][kPerLane] = {};
  };

  template <int kPerLane>
  struct Token {
    float q[kPerLane];
    float k[kPerLane];
    float decay[kPerLane];
    float erase[kPerLane];
    const Params& p;
    int64_t t;
    int64_t head;

    __device__ Token(const Params& params, int64_t token, int64_t value_head, int lane)
        : p(params), t(token), head(value_head) {
      const gdn2_backward_args& a = p.args;
      const int64_t at = value_head / p.ratio * a.key_dim;
      const int64_t gate = (t * a.gate_heads + value_head / p.gate_ratio) * a.key_dim;
      const int K = static_cast<int>(a.key_dim);
      walk::LoadLanes(a.q, a.qkv_dtype, t * a.q_token_stride + at, K, lane, q);
      walk::LoadLanes(a.k, a.qkv_dtype, t * a.k_token_stride + at, K, lane, k);
      walk::LoadLanes(a.g, GDN_F32, gate, K, lane, decay);
      walk::LoadLanes(a.erase, a.gate_dtype, gate, K, lane, erase);
#pragma unroll
      for (int c = 0; c < kPerLane; ++c) decay[c] = expf(decay[c]);
    }
    __device__ float Value(int row) const {
      const gdn2_backward_args& a = p.args;
      return LoadAs(a.v, a.qkv_dtype, t * a.v_token_stride + head * a.value_dim + row);
    }
    __device__ int64_t WriteAt(int row) const {
      return (t * p.args.value_heads + head) * p.args.value_dim + row;
    }

    // Returns u.
    __device__ float Forward(int row, int rows, float (&s)[kPerLane]) const {
      if (row >= rows) return 0.0f;
      float erased = 0.0f;
#pragma unroll
      for (int c = 0; c < kPerLane; ++c) {
        s[c] *= decay[c];
        erased = fmaf(s[c], erase[c] * k[c], erased);
      }
      const float write = LoadAs(p.args.write, p.args.gate_dtype, WriteAt(row));
      const float u = fmaf(write, Value(row), -LaneSum(erased));
#pragma unroll
      for (int c = 0; c < kPerLane; ++c) s[c] = fmaf(u, k[c], s[c]);
      return u;
    }

    __device__ void Backward(int row, int rows, float u, const float (&before)[kPerLane],
                             float (&d_s)[kPerLane], Sums<kPerLane>* sums) const {
      if (row >= rows) return;
      const gdn2_backward_args& a = p.args;
      const float d_o =
          p.scale * LoadAs(a.d_o, a.d_o_dtype, t * a.d_o_token_stride + head * a.value_dim + row);
      float d_u = 0.0f;
#pragma unroll
      for (int c = 0; c < kPerLane; ++c) {
        const float after = fmaf(u, k[c], decay[c] * before[c]);
        sums->vector[0][c] = fmaf(after, d_o, sums->vector[0][c]);
        d_s[c] = fmaf(q[c], d_o, d_s[c]);
        d_u = fmaf(d_s[c], k[c], d_u);
      }
      d_u = LaneSum(d_u);
#pragma unroll
      for (int c = 0; c < kPerLane; ++c) {
        const float d_erased_key = -(decay[c] * before[c]) * d_u;
        sums->vector[3][c] = fmaf(d_erased_key, k[c], sums->vector[3][c]);
        const float through_u = fmaf(d_s[c], u, sums->vector[1][c]);
        sums->vector[1][c] = fmaf(d_erased_key, erase[c], through_u);
        d_s[c] = fmaf(-(erase[c] * k[c]), d_u, d_s[c]);
        d_s[c] *= decay[c];
        sums->vector[2][c] = fmaf(d_s[c], before[c], sums->vector[2][c]);
      }
      if (threadIdx.x % 32 == 0) {
        const int64_t at = WriteAt(row);
        a.d_write[at] = d_u * Value(row);
        StoreAs(a.d_v, a.d_qkv_dtype, t * a.d_v_token_stride + head * a.value_dim + row,
                d_u * LoadAs(a.write, a.gate_dtype, at));
      }
    }
  };
};

}  // namespace

size_t Gdn2BackwardWorkspace(const gdn2_backward_args& args) {
  return walk::WorkspaceBytes(args, ChannelRule::kVectors);
}

gdn_status Gdn2Backward(const gdn_exec& exec, const gdn2_backward_args& args) {
  if (args.sequences == 0) return GDN_OK;
  Device device;
  if (const gdn_status status = CurrentDevice(kOp, &device); status != GDN_OK) return status;
  ChannelRule::Params params;
  params.args = args;
  params.scale = static_cast<float>(kernels::RuleScale(args.scale, args.key_dim));
  params.ratio = static_cast<int32_t>(args.value_heads / args.key_heads);
  params.gate_ratio = static_cast<int32_t>(args.value_heads / args.gate_heads);
  params.scratch = walk::LayOut(args, exec.workspace);
  walk::Launch<ChannelRule>(params, Stream(exec));
  if (const gdn_status status = CheckLaunch(kOp); status != GDN_OK) return status;
  const float* const partials = params.scratch.partials;
  const int64_t size = walk::PartialSize(args);
  KeyGradients all = QueryAndKeyGradients(args, partials);
  for (int i = 2; i < ChannelRule::kVectors; ++i) {
    KeyGradient& gate = all.of[all.count++];
    gate.partials = partials + i * size;
    gate.heads = args.gate_heads;
    gate.ratio = params.gate_ratio;
    gate.dim = args.key_dim;
    gate.out = i == 2 ? args.d_g : args.d_erase;
    gate.out_dtype = GDN_F32;
    gate.out_token_stride = args.gate_heads * args.key_dim;
  }
  LaunchKeyGradients(all, args.tokens, Stream(exec));
  return CheckLaunch(kOp);
}

}  // namespace gdn::cuda
