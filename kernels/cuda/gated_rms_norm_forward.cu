#include "kernels/cuda/gated_rms_norm_forward.cuh"

#include <algorithm>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/linear_launch.h"

namespace gdn::cuda {
namespace {

constexpr char kOp[] = "gated_rms_norm_forward";
constexpr int kThreads = 128;

// The outputs that are not a row's: amax, which the rows join, and without rows the scale too.
__global__ void Prepare(float* amax, const float* fp8_scale, float* fp8_scale_inv) {
  WaitForPreviousKernel();
  AllowNextKernel();
  if (amax != nullptr) *amax = 0.0f;
  if (fp8_scale_inv != nullptr) *fp8_scale_inv = __fdiv_rn(1.0f, *fp8_scale);
}

// The bytes of an access of the tuned kernels to x and gate; 0: they do not cover this call.
int TunedUnit(const GatedForward& p) {
  const int64_t dim = p.args.in.dim;
  const int unit = std::min(p.x_unit, p.gate_unit);
  const int least = p.args.fp8 == GDN_FP8_NONE ? 2 : 16;
  const bool tuned = dim == 32 || dim == 64 || dim == 128 || dim == 256;
  return tuned && p.y_vectors && p.axes.rows < kMaxDivided && unit >= least ? unit : 0;
}

template <typename X, typename G, typename Unit, int kDim, bool kFp8, int kRows>
cudaError_t LaunchRows(const GatedForward& p, bool early, cudaStream_t stream) {
  constexpr int64_t kBlockRows = kThreads / (kDim / kVectorElements) * kRows;
  const dim3 grid(static_cast<unsigned>((p.axes.rows + kBlockRows - 1) / kBlockRows));
  return LaunchMaybeEarly(early, grid, dim3(kThreads), 0, stream,
                          ForwardRows<X, G, Unit, kDim, kFp8, kRows, kThreads>, p);
}

template <typename X, typename G, typename Unit, int kDim>
cudaError_t LaunchRows(const GatedForward& p, bool early, cudaStream_t stream) {
  if constexpr (sizeof(Unit) == 16) {
    // A thread with one row lets the most blocks take turns. Where rows are many, the chain of the
    // row scale wants a second one beside it.
    constexpr int64_t kMany = 65536 * 128 / kDim;
    if (p.args.fp8 != GDN_FP8_NONE) {
      return p.axes.rows <= kMany ? LaunchRows<X, G, Unit, kDim, true, 1>(p, early, stream)
                                  : LaunchRows<X, G, Unit, kDim, true, 2>(p, early, stream);
    }
  }
  return LaunchRows<X, G, Unit, kDim, false, 1>(p, early, stream);
}

template <typename X, typename G, typename Unit>
cudaError_t LaunchTuned(const GatedForward& p, bool early, cudaStream_t stream) {
  switch (p.args.in.dim) {
    case 32:
      return LaunchRows<X, G, Unit, 32>(p, early, stream);
    case 64:
      return LaunchRows<X, G, Unit, 64>(p, early, stream);
    case 128:
      return LaunchRows<X, G, Unit, 128>(p, early, stream);
    default:
      return LaunchRows<X, G, Unit, 256>(p, early, stream);
  }
}

template <typename X, typename G>
cudaError_t Launch(const GatedForward& p, bool early, cudaStream_t stream) {
  if constexpr (sizeof(X) == 2) {
    const int unit = TunedUnit(p);
    if (unit == 16) return LaunchTuned<X, G, uint4>(p, early, stream);
    if (unit == 8) return LaunchTuned<X, G, uint2>(p, early, stream);
    if (unit > 0) return LaunchTuned<X, G, uint16_t>(p, early, stream);
  }
  const bool warp = p.args.in.dim <= 32 * kVectorElements;
  constexpr int64_t kBlock = kAnyThreads * kVectorElements;
  const dim3 grid(GridFor(p.axes.rows, warp ? kAnyThreads / 32 : 1));
  return LaunchMaybeEarly(early, grid, dim3(kAnyThreads), 0, stream,
                          warp                      ? ForwardAnyRows<X, G, 32, 1>
                          : p.args.in.dim <= kBlock ? ForwardAnyRows<X, G, kAnyThreads, 1>
                                                    : ForwardAnyRows<X, G, kAnyThreads, 4>,
                          p);
}

GatedForward Describe(const gdn_gated_rms_norm_forward_args& args) {
  GatedForward p{};
  p.args = args;
  gdn_gated_rms_norm_input& in = p.args.in;
  in.x_strides = UsedStrides(in, in.x_strides);
  in.gate_strides = UsedStrides(in, in.gate_strides);
  p.axes = AxesOf(in);
  p.dense = IsDense(in, in.x_strides) && IsDense(in, in.gate_strides);
  p.x_unit = UnitOf(in, in.x, in.x_dtype == GDN_F32 ? 4 : 2, in.x_strides);
  p.gate_unit = UnitOf(in, in.gate, in.gate_dtype == GDN_F32 ? 4 : 2, in.gate_strides);
  const bool whole = in.dim % kVectorElements == 0;
  p.gamma_vectors = whole && reinterpret_cast<uintptr_t>(in.gamma) % 16 == 0;
  // Eight FP8 bytes are one access of eight.
  p.y_vectors =
      whole && reinterpret_cast<uintptr_t>(args.y) % (args.fp8 == GDN_FP8_NONE ? 16 : 8) == 0;
  return p;
}

}  // namespace

gdn_status GatedRmsNormForward(const gdn_exec& exec, const gdn_gated_rms_norm_forward_args& args) {
  Device device;
  if (const gdn_status status = CurrentDevice(kOp, &device); status != GDN_OK) return status;
  const GatedForward p = Describe(args);
  const bool empty = p.axes.rows == 0;
  const bool early = device.compute_capability >= 90;
  cudaError_t error = cudaSuccess;
  float* const scale_inv = empty && args.fp8 == GDN_FP8_STATIC ? args.fp8_scale_inv : nullptr;
  if (args.amax != nullptr || scale_inv != nullptr) {
    error = LaunchMaybeEarly(early, dim3(1), dim3(1), 0, Stream(exec), Prepare, args.amax,
                             args.fp8_scale, scale_inv);
    if (const gdn_status status = CheckCuda(kOp, error); status != GDN_OK) return status;
  }
  if (empty) return GDN_OK;
  ForElementType(args.in.x_dtype, [&]<typename X>() {
    error = args.in.gate_dtype == GDN_F32 ? Launch<X, float>(p, early, Stream(exec))
                                          : Launch<X, X>(p, early, Stream(exec));
  });
  return CheckCuda(kOp, error);
}

}  // namespace gdn::cuda
