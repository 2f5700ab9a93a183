#include <cmath>
#include <cstdint>

#include "kernels/common/check.h"
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/fused_decode.cuh"
#include "kernels/cuda/launch.h"

namespace gdn::cuda {
namespace {

constexpr char kOp[] = "fused_decode";
constexpr int64_t kMaxCluster = 8;  // The portable maximum.

bool Aligned(const void* pointer, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(bytes) == 0;
}

// The 128x128 kernel loads states 16 bytes at a time and q|k in pairs.
bool Suits128(const gdn_fused_decode_args& a) {
  const int64_t state_vector = a.state_dtype == GDN_F32 ? 4 : 8;
  return a.key_dim == 128 && a.value_dim == 128 && a.conv_width == 4 && a.dtype != GDN_F32 &&
         Aligned(a.state, 16) && a.state_slot_stride % state_vector == 0 &&
         Aligned(a.conv_weight, 16) && Aligned(a.x, 4) && a.x_token_stride % 2 == 0 &&
         a.q_offset % 2 == 0 && a.k_offset % 2 == 0 && Aligned(a.conv_state, 4) &&
         a.conv_slot_stride % 2 == 0;
}

// A tiling whose cluster is too large, or a cluster on a device without clusters, cannot run.
bool CanRun(const gdn_fused_decode_args& a, int tiling, const Device& device) {
  const int64_t cluster = a.value_heads / a.key_heads * kDecodeTilings[tiling].splits;
  return cluster <= kMaxCluster && (cluster == 1 || device.compute_capability >= 90);
}

bool HasWork(const gdn_fused_decode_args& a) { return a.rows > 0; }

}  // namespace

gdn_status ChooseDecodeTiling(const gdn_fused_decode_args& args, int* tiling) {
  *tiling = -1;
  if (!HasWork(args) || !Suits128(args)) return GDN_OK;
  Device device;
  if (const gdn_status status = CurrentDevice(kOp, &device); status != GDN_OK) return status;
  // Few heads: divide each over several multiprocessors, for latency. Many: whole heads.
  const int64_t heads = args.rows * args.value_heads;
  int choice = 0;
  for (int candidate : {4, 3, 2}) {
    if (CanRun(args, candidate, device) &&
        heads * kDecodeTilings[candidate].splits <= 2 * device.multiprocessors) {
      choice = candidate;
      break;
    }
  }
  if (CanRun(args, choice, device)) *tiling = choice;
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
  FusedParams params;
  params.args = args;
  params.channels = 2 * args.key_heads * args.key_dim + args.value_heads * args.value_dim;
  params.scale = args.scale != 0.0f
                     ? args.scale
                     : static_cast<float>(1.0 / std::sqrt(static_cast<double>(args.key_dim)));
  params.ratio = static_cast<int32_t>(args.value_heads / args.key_heads);
  const cudaStream_t stream = Stream(exec);
  cudaError_t error = cudaErrorInvalidValue;
  if (tiling < 0) {
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
    error = args.dtype == GDN_BF16 ? LaunchDecode128<Bf16>(params, tiling, stream)
                                   : LaunchDecode128<F16>(params, tiling, stream);
  }
  if (error != cudaSuccess) (void)cudaGetLastError();
  if (const gdn_status status = CheckCuda(kOp, error); status != GDN_OK) return status;
  return CheckLaunch(kOp);
}

gdn_status FusedDecode(const gdn_exec& exec, const gdn_fused_decode_args& args) {
  int tiling = -1;
  if (const gdn_status status = ChooseDecodeTiling(args, &tiling); status != GDN_OK) return status;
  return FusedDecodeWith(exec, args, tiling);
}

}  // namespace gdn::cuda
