#include <cmath>
#include <cstdint>

#include "kernels/common/check.h"
#include "kernels/common/rule_args.h"
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/fused_decode.cuh"
#include "kernels/cuda/launch.h"

namespace gdn::cuda {
namespace {

constexpr char kOp[] = "fused_decode";
constexpr int64_t kMaxOffset = int64_t{1} << 30;  // Of the columns, in 32 bits with room to add.

bool Aligned(const void* pointer, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(bytes) == 0;
}

// The 128x128 kernel loads states 16 bytes at a time and q|k in pairs.
bool Suits128(const gdn_fused_decode_args& a) {
  const int64_t state_vector = a.state_dtype == GDN_F32 ? 4 : 8;
  return a.key_dim == 128 && a.value_dim == 128 && a.conv_width == 4 && a.dtype != GDN_F32 &&
         Aligned(a.state, 16) && a.state_slot_stride % state_vector == 0 &&
         Aligned(a.conv_weight, 16) && Aligned(a.x, 4) && Aligned(a.y, 4) &&
         a.y_token_stride % 2 == 0 && Aligned(a.norm_weight, 8) && a.x_token_stride % 2 == 0 &&
         a.q_offset % 2 == 0 && a.k_offset % 2 == 0 && a.v_offset % 2 == 0 && a.z_offset % 2 == 0 &&
         Aligned(a.conv_state, 4) && a.conv_slot_stride % 2 == 0 && a.rows < (int64_t{1} << 31) &&
         a.key_heads <= 4096 && a.q_offset <= kMaxOffset && a.k_offset <= kMaxOffset &&
         a.v_offset <= kMaxOffset && a.z_offset <= kMaxOffset && a.b_offset <= kMaxOffset &&
         a.a_offset <= kMaxOffset;
}

// The tilings, as indices into kDecodeTilings.
constexpr int kStream = 0;
constexpr int kWhole = 1;
constexpr int kHalves = 2;
constexpr int kQuarters = 3;
constexpr int kWholeSmall = 4;
constexpr int kWholeBulk = 5;

// Clusters and bulk copies need sm_90; the streaming kernel also its shared memory, which sm_120
// has not.
bool CanRun(const gdn_fused_decode_args& a, int tiling, const Device& device) {
  const int64_t ratio = a.value_heads / a.key_heads;
  const int capability = device.compute_capability;
  if (!DecodeTilingCovers(tiling, ratio, a.tokens)) return false;
  if (tiling == kStream) return capability >= 90 && capability < 120;
  const bool bulk = tiling == kWholeBulk || tiling == kWholeSmall;
  return capability >= 90 || (kDecodeTilings[tiling].splits * ratio == 1 && !bulk);
}

bool HasWork(const gdn_fused_decode_args& a) { return a.rows > 0; }

int64_t Channels(const gdn_fused_decode_args& a) {
  return 2 * a.key_heads * a.key_dim + a.value_heads * a.value_dim;
}

float Scale(const gdn_fused_decode_args& a) {
  return static_cast<float>(kernels::RuleScale(a.scale, a.key_dim));
}

DecodeParams Pack(const gdn_fused_decode_args& a, const Device& device) {
  DecodeParams p = {};
  p.read_index = a.read_index;
  p.write_index = a.write_index;
  p.fresh = a.fresh;
  p.state = a.state;
  p.state_slot_stride = a.state_slot_stride;
  p.conv_state = a.conv_state;
  p.conv_slot_stride = a.conv_slot_stride;
  p.channels = static_cast<int32_t>(Channels(a));
  p.ratio = static_cast<int32_t>(a.value_heads / a.key_heads);
  p.conv_weight = a.conv_weight;
  p.x = a.x;
  p.x_token_stride = a.x_token_stride;
  p.q_offset = static_cast<int32_t>(a.q_offset);
  p.k_offset = static_cast<int32_t>(a.k_offset);
  p.v_offset = static_cast<int32_t>(a.v_offset);
  p.z_offset = static_cast<int32_t>(a.z_offset);
  p.b_offset = static_cast<int32_t>(a.b_offset);
  p.a_offset = static_cast<int32_t>(a.a_offset);
  p.rows = static_cast<uint32_t>(a.rows);
  p.key_heads = static_cast<uint32_t>(a.key_heads);
  p.a_log = a.a_log;
  p.dt_bias = a.dt_bias;
  p.norm_weight = a.norm_weight;
  p.y = a.y;
  p.y_token_stride = a.y_token_stride;
  p.beta_scale = a.beta_scale;
  p.scale = Scale(a);
  p.eps = a.eps;
  p.multiprocessors = device.multiprocessors;
  p.tokens = static_cast<int8_t>(a.tokens);
  p.early_start = a.early_start != 0;
  p.use_qk_l2norm = a.use_qk_l2norm != 0;
  p.zero_centered = a.zero_centered != 0;
  p.sigmoid_gate = a.activation == GDN_GATE_SIGMOID;
  p.round_o = a.round_o != 0;
  p.round_before_gate = a.round_before_gate != 0;
  return p;
}

// Whole heads, except where measurements on an H200 say otherwise; docs/benchmarks-gpu.md. Dividing
// a head saves latency that an early start hides anyway.
int Choose(const gdn_fused_decode_args& a, const Device& device) {
  const int64_t heads = a.rows * a.value_heads;
  const int64_t ratio = a.value_heads / a.key_heads;
  const int64_t multiprocessors = device.multiprocessors;
  const bool early = a.early_start != 0;
  const bool wide = a.state_dtype == GDN_F32;
  const auto can = [&](int tiling) { return CanRun(a, tiling, device); };

  const int64_t few = a.tokens > 1 ? multiprocessors
                      : early      ? multiprocessors / 8
                      : wide       ? multiprocessors
                                   : multiprocessors / 2;
  if (heads <= few && can(kQuarters)) return kQuarters;
  if (heads <= few && !early && ratio < 4 && can(kHalves)) return kHalves;
  if (wide && can(kStream)) {
    // Two of the streaming blocks run on a multiprocessor at once.
    const int64_t blocks = a.key_heads * (ratio > 1 ? a.rows : (a.rows + 1) / 2);
    const int64_t wave = 2 * multiprocessors;
    if (blocks <= wave && 10 * blocks >= 9 * wave) return kStream;
  }
  if (wide) {
    if (early && heads > 6 * multiprocessors && can(kWholeSmall)) return kWholeSmall;
    if (5 * heads > 2 * multiprocessors && can(kWholeBulk)) return kWholeBulk;
  } else {
    // Five blocks of kWholeBulk run on a multiprocessor at once, four of kWholeSmall; where these
    // are enough depends on the cluster.
    const int64_t quarters = ratio == 4 ? 16 : ratio == 3 ? 11 : 13;
    if (4 * heads > quarters * multiprocessors && can(kWholeSmall)) return kWholeSmall;
    const int64_t many = early && ratio <= 2 ? 4 : 3;
    if (2 * heads > many * multiprocessors && can(kWholeBulk)) return kWholeBulk;
  }
  return can(kWhole) ? kWhole : -1;
}

}  // namespace

gdn_status ChooseDecodeTiling(const gdn_fused_decode_args& args, int* tiling) {
  *tiling = -1;
  if (!HasWork(args) || !Suits128(args)) return GDN_OK;
  Device device;
  if (const gdn_status status = CurrentDevice(kOp, &device); status != GDN_OK) return status;
  *tiling = Choose(args, device);
  return GDN_OK;
}

gdn_status FusedDecodeWith(const gdn_exec& exec, const gdn_fused_decode_args& args, int tiling) {
  if (!HasWork(args)) return GDN_OK;
  GDN_CHECK_ARG(args.rows <= kMaxGridY * kMaxGridY, GDN_UNSUPPORTED_SHAPE,
                "%s: rows must be at most 65535^2, got %lld", kOp,
                static_cast<long long>(args.rows));
  GDN_CHECK_ARG(args.key_heads <= (int64_t{1} << 27), GDN_UNSUPPORTED_SHAPE,
                "%s: key_heads must be at most 2^27, got %lld", kOp,
                static_cast<long long>(args.key_heads));
  Device device;
  if (const gdn_status status = CurrentDevice(kOp, &device); status != GDN_OK) return status;
  const cudaStream_t stream = Stream(exec);
  cudaError_t error = cudaErrorInvalidValue;
  if (tiling < 0) {
    const GenericDecodeParams params = {args, Channels(args), Scale(args),
                                        static_cast<int32_t>(args.value_heads / args.key_heads)};
    switch (args.dtype) {
      case GDN_F32:
        error = LaunchDecodeGeneric<float>(params, stream);
        break;
      case GDN_BF16:
        error = LaunchDecodeGeneric<Bf16>(params, stream);
        break;
      case GDN_F16:
        error = LaunchDecodeGeneric<F16>(params, stream);
        break;
    }
  } else {
    GDN_CHECK_ARG(tiling < kNumDecodeTilings && Suits128(args) && CanRun(args, tiling, device),
                  GDN_UNSUPPORTED_SHAPE, "%s: tiling %d does not cover these arguments", kOp,
                  tiling);
    const DecodeParams params = Pack(args, device);
    const auto launch = args.dtype == GDN_BF16 ? LaunchDecode128<Bf16> : LaunchDecode128<F16>;
    error = launch(params, args.state_dtype, tiling, stream);
  }
  if (const gdn_status status = CheckCuda(kOp, error); status != GDN_OK) return status;
  return CheckLaunch(kOp);
}

gdn_status FusedDecode(const gdn_exec& exec, const gdn_fused_decode_args& args) {
  int tiling = -1;
  if (const gdn_status status = ChooseDecodeTiling(args, &tiling); status != GDN_OK) return status;
  return FusedDecodeWith(exec, args, tiling);
}

}  // namespace gdn::cuda
