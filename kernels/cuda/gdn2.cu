#include "gdn/kernels/gdn2.h"

#include <cmath>

#include "kernels/common/rule_args.h"
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/gdn2_chunk.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/math.cuh"

// GDN2 as a recurrence over a sequence's tokens, for the step and for those prefills that the
// chunked kernels do not cover. A warp keeps kRows rows of a head's state in registers, a lane
// every 32nd column of them, and needs nothing of the other rows.

namespace gdn::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kRows = 4;

struct Params {
  gdn2_args args;
  float scale;         // Never 0.
  int32_t ratio;       // HV / H.
  int32_t gate_ratio;  // HV / G.
  int32_t step;        // Non-zero: token i belongs to sequence i.
};

// What a lane takes of a token: its columns of q and k, of the decay, and of erase * k.
template <int kPerLane>
struct Keys {
  float q[kPerLane];
  float k[kPerLane];
  float decay[kPerLane];
  float erased[kPerLane];
};

// One head of q or k, normalised on request, then scaled.
template <int kPerLane>
__device__ inline void LoadKey(const void* data, gdn_dtype dtype, int64_t offset, int dim, int lane,
                               bool norm, float scale, float (&out)[kPerLane]) {
  float sum = 0.0f;
#pragma unroll
  for (int c = 0; c < kPerLane; ++c) {
    const int i = lane + 32 * c;
    out[c] = i < dim ? LoadAs(data, dtype, offset + i) : 0.0f;
    sum = fmaf(out[c], out[c], sum);
  }
  const float factor = norm ? rsqrtf(LaneSum(sum) + kQkNormEps) * scale : scale;
#pragma unroll
  for (int c = 0; c < kPerLane; ++c) out[c] *= factor;
}

template <int kPerLane>
__device__ inline void LoadKeys(const Params& p, int64_t t, int64_t head, int lane,
                                Keys<kPerLane>* keys) {
  const gdn2_args& a = p.args;
  const int K = static_cast<int>(a.key_dim);
  const int64_t at = head / p.ratio * K;
  const bool norm = a.use_qk_l2norm != 0;
  LoadKey(a.q, a.qkv_dtype, t * a.q_token_stride + at, K, lane, norm, p.scale, keys->q);
  LoadKey(a.k, a.qkv_dtype, t * a.k_token_stride + at, K, lane, norm, 1.0f, keys->k);
  const int64_t gate = (t * a.gate_heads + head / p.gate_ratio) * K;
#pragma unroll
  for (int c = 0; c < kPerLane; ++c) {
    const int i = lane + 32 * c;
    keys->decay[c] = i < K ? expf(a.g[gate + i]) : 0.0f;
    keys->erased[c] = i < K ? LoadAs(a.erase, a.gate_dtype, gate + i) * keys->k[c] : 0.0f;
  }
}

template <int kPerLane>
__global__ void __launch_bounds__(kThreads) Kernel(const __grid_constant__ Params p) {
  const gdn2_args& a = p.args;
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
    const int64_t from = read * a.state_slot_stride + offset;
    const int64_t to = write * a.state_slot_stride + offset;
    float s[kRows][kPerLane];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int c = 0; c < kPerLane; ++c) {
        const bool inside = first_row + r < V && lane + 32 * c < K;
        s[r][c] = inside && !fresh ? LoadAs(a.state, a.state_dtype, from + r * K + 32 * c) : 0.0f;
      }
    }
    for (int64_t t = begin; t < end; ++t) {
      Keys<kPerLane> keys;
      LoadKeys(p, t, head, lane, &keys);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (first_row + r < V) {
          float erased = 0.0f;
#pragma unroll
          for (int c = 0; c < kPerLane; ++c) {
            s[r][c] *= keys.decay[c];
            erased = fmaf(s[r][c], keys.erased[c], erased);
          }
          const int64_t row = head * V + first_row + r;
          const float value = LoadAs(a.v, a.qkv_dtype, t * a.v_token_stride + row);
          const float strength = LoadAs(a.write, a.gate_dtype, t * a.value_heads * V + row);
          const float u = fmaf(strength, value, -LaneSum(erased));
          float o = 0.0f;
#pragma unroll
          for (int c = 0; c < kPerLane; ++c) {
            s[r][c] = fmaf(u, keys.k[c], s[r][c]);
            o = fmaf(s[r][c], keys.q[c], o);
          }
          o = LaneSum(o);
          if (lane == 0) StoreAs(a.o, a.o_dtype, t * a.o_token_stride + row, o);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int c = 0; c < kPerLane; ++c) {
        if (first_row + r < V && lane + 32 * c < K) {
          StoreAs(a.state, a.state_dtype, to + r * K + 32 * c, s[r][c]);
        }
      }
    }
  }
}

gdn_status Run(const char* op, const gdn_exec& exec, const gdn2_args& args, bool step) {
  if (args.sequences == 0) return GDN_OK;
  Params params;
  params.args = args;
  params.scale = static_cast<float>(kernels::RuleScale(args.scale, args.key_dim));
  params.ratio = static_cast<int32_t>(args.value_heads / args.key_heads);
  params.gate_ratio = static_cast<int32_t>(args.value_heads / args.gate_heads);
  params.step = step ? 1 : 0;
  constexpr int kBlockRows = kWarps * kRows;
  const dim3 grid(GridFor(args.sequences * args.value_heads, 1),
                  static_cast<unsigned>((args.value_dim + kBlockRows - 1) / kBlockRows));
  if (args.key_dim <= 128) {
    Kernel<4><<<grid, kThreads, 0, Stream(exec)>>>(params);
  } else {
    Kernel<8><<<grid, kThreads, 0, Stream(exec)>>>(params);
  }
  return CheckLaunch(op);
}

}  // namespace

gdn_status Gdn2Step(const gdn_exec& exec, const gdn2_args& args) {
  return Run("gdn2_step", exec, args, /*step=*/true);
}

gdn_status Gdn2Prefill(const gdn_exec& exec, const gdn2_args& args) {
  if (args.sequences == 0) return GDN_OK;
  Device device;
  if (const gdn_status status = CurrentDevice("gdn2_prefill", &device); status != GDN_OK) {
    return status;
  }
  if (CoversChunkedGdn2(device, args)) return LaunchChunkedGdn2(exec, device, args);
  return Run("gdn2_prefill", exec, args, /*step=*/false);
}

size_t Gdn2PrefillWorkspace(const gdn2_args& args) {
  return args.sequences > 0 && MayCoverChunkedGdn2(args) ? ChunkedGdn2Workspace(args) : 0;
}

}  // namespace gdn::cuda
