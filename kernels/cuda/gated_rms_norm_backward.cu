#include "kernels/cuda/gated_rms_norm_backward.cuh"

#include <algorithm>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/tiled_sums.cuh"

namespace gdn::cuda {
namespace {

constexpr char kOp[] = "gated_rms_norm_backward";

// Rows behind each partial row of dgamma: a function of the extents alone, so that no device moves
// a bit. Short rows: enough blocks to even out what multiprocessors get of the memory's bandwidth,
// few enough for the partial rows to be small beside the input.
int64_t PartialRows(const gdn_gated_rms_norm_input& in) {
  const int64_t rows = in.batch * in.seq * in.heads;
  if (in.dim > kStreamsMaxDim) {
    constexpr int64_t kMaxPartials = 384;
    return std::max<int64_t>(1, (rows + kMaxPartials - 1) / kMaxPartials);
  }
  constexpr int64_t kWanted = 1024;
  constexpr int64_t kMaxPartials = 16384;
  const int64_t most = std::max<int64_t>(64, (rows > 512 * kWanted ? 128 : 64) * 128 / in.dim);
  const int64_t each = std::max(std::min((rows + kWanted - 1) / kWanted, most),
                                (rows + kMaxPartials - 1) / kMaxPartials);
  return std::max<int64_t>(1, (each + kStreams - 1) / kStreams) * kStreams;
}

int64_t Partials(const gdn_gated_rms_norm_input& in) {
  const int64_t each = PartialRows(in);
  return (in.batch * in.seq * in.heads + each - 1) / each;
}

// The bytes of an access of the tuned kernels to x, gate and dy; 0: they do not cover this call.
int TunedUnit(const GatedBackward& p) {
  const int64_t dim = p.dim;
  const int unit = std::min({p.x_unit, p.gate_unit, p.dy_unit});
  const bool tuned = dim == 64 || dim == 128 || dim == 256;
  const bool covers = tuned && p.dx_vectors && p.dgate_vectors && p.axes.rows < kMaxDivided;
  return covers ? unit : 0;
}

cudaError_t LaunchKernel(const GatedBackward& p, int threads, void (*kernel)(GatedBackward),
                         bool early, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((p.axes.rows + p.partial_rows - 1) / p.partial_rows));
  return LaunchMaybeEarly(early, grid, dim3(static_cast<unsigned>(threads)), 0, stream, kernel, p);
}

template <typename X, typename G, typename Unit, bool kDense, bool kSilu>
cudaError_t LaunchTuned(const GatedBackward& p, bool early, cudaStream_t stream) {
  const auto launch = [&](int threads, void (*kernel)(GatedBackward)) {
    return LaunchKernel(p, threads, kernel, early, stream);
  };
  switch (p.dim) {
    case 64:
      return launch(kBackwardThreads<64>, BackwardRows<X, G, Unit, kDense, 64, kSilu>);
    case 128:
      return launch(kBackwardThreads<128>, BackwardRows<X, G, Unit, kDense, 128, kSilu>);
    default:
      return launch(kBackwardThreads<256>, BackwardRows<X, G, Unit, kDense, 256, kSilu>);
  }
}

template <typename X, typename G, bool kSilu>
cudaError_t Launch(const GatedBackward& p, bool early, cudaStream_t stream) {
  if constexpr (sizeof(X) == 2) {
    const int unit = TunedUnit(p);
    if (unit == 16) {
      return p.dense ? LaunchTuned<X, G, uint4, true, kSilu>(p, early, stream)
                     : LaunchTuned<X, G, uint4, false, kSilu>(p, early, stream);
    }
    if (unit == 8) return LaunchTuned<X, G, uint2, false, kSilu>(p, early, stream);
    if (unit > 0) return LaunchTuned<X, G, uint16_t, false, kSilu>(p, early, stream);
  }
  const auto launch = [&](int threads, void (*kernel)(GatedBackward)) {
    return LaunchKernel(p, threads, kernel, early, stream);
  };
  constexpr int kBlock = 256;
  if (p.dim <= kStreamsMaxDim) {
    return launch(kAnyBackwardThreads<32>, BackwardAnyRows<X, G, 32, 1, kSilu>);
  }
  return p.dim <= kBlock * kVectorElements
             ? launch(kBlock, BackwardAnyRows<X, G, kBlock, 1, kSilu>)
             : launch(kBlock, BackwardAnyRows<X, G, kBlock, 4, kSilu>);
}

GatedBackward Describe(const gdn_exec& exec, const gdn_gated_rms_norm_backward_args& args) {
  const gdn_gated_rms_norm_input& in = args.in;
  const auto aligned = [&](const void* data) {
    return in.dim % kVectorElements == 0 && IsAligned(data, 16);
  };
  GatedBackward p{};
  p.x = in.x;
  p.gate = in.gate;
  p.dy = args.dy;
  p.rstd = args.rstd;
  p.dx = args.dx;
  p.dgate = args.dgate;
  p.partial = static_cast<float*>(exec.workspace);
  p.gamma = {in.gamma, in.gamma_dtype, in.zero_centered_gamma != 0, aligned(in.gamma)};
  p.partial_rows = PartialRows(in);
  p.axes = AxesOf(in);
  p.dim = in.dim;
  p.x_strides = UsedStrides(in, in.x_strides);
  p.gate_strides = UsedStrides(in, in.gate_strides);
  p.dy_strides = UsedStrides(in, args.dy_strides);
  p.dense = IsDense(in, p.x_strides) && IsDense(in, p.gate_strides) && IsDense(in, p.dy_strides);
  const int64_t x_size = in.x_dtype == GDN_F32 ? 4 : 2;
  const int64_t gate_size = in.gate_dtype == GDN_F32 ? 4 : 2;
  p.x_unit = UnitOf(in, in.x, x_size, p.x_strides);
  p.gate_unit = UnitOf(in, in.gate, gate_size, p.gate_strides);
  p.dy_unit = UnitOf(in, args.dy, x_size, p.dy_strides);
  p.dx_vectors = aligned(args.dx);
  p.dgate_vectors = aligned(args.dgate);
  return p;
}

}  // namespace

size_t GatedRmsNormBackwardWorkspace(const gdn_gated_rms_norm_backward_args& args) {
  return static_cast<size_t>(TiledElements(Partials(args.in), args.in.dim)) * sizeof(float);
}

gdn_status GatedRmsNormBackward(const gdn_exec& exec,
                                const gdn_gated_rms_norm_backward_args& args) {
  Device device;
  if (const gdn_status status = CurrentDevice(kOp, &device); status != GDN_OK) return status;
  const int64_t partials = Partials(args.in);
  if (partials > 0) {
    const GatedBackward p = Describe(exec, args);
    const bool early = device.compute_capability >= 90;
    cudaError_t error = cudaSuccess;
    const bool silu = args.in.activation == GDN_GATE_SILU;
    const auto launch = [&]<typename X, typename G>() {
      return silu ? Launch<X, G, true>(p, early, Stream(exec))
                  : Launch<X, G, false>(p, early, Stream(exec));
    };
    ForElementType(args.in.x_dtype, [&]<typename X>() {
      error = args.in.gate_dtype == GDN_F32 ? launch.template operator()<X, float>()
                                            : launch.template operator()<X, X>();
    });
    if (const gdn_status status = CheckCuda(kOp, error); status != GDN_OK) return status;
  }
  const TiledSums sums = {static_cast<const float*>(exec.workspace), partials, args.in.dim,
                          args.dgamma, args.in.gamma_dtype};
  return LaunchTiledSums(kOp, sums, device, Stream(exec));
}

}  // namespace gdn::cuda
