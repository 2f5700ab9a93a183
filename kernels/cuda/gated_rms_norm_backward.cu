#include "kernels/cuda/gated_rms_norm_backward.cuh"

#include <algorithm>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/partial_sums.cuh"

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
  const int64_t most = (rows > 512 * kWanted ? 128 : 64) * 128 / in.dim;
  const int64_t each = std::max(std::min((rows + kWanted - 1) / kWanted, most),
                                (rows + kMaxPartials - 1) / kMaxPartials);
  return std::max<int64_t>(1, (each + kStreams - 1) / kStreams) * kStreams;
}

int64_t Partials(const gdn_gated_rms_norm_input& in) {
  const int64_t each = PartialRows(in);
  return (in.batch * in.seq * in.heads + each - 1) / each;
}

bool CoversRows(const GatedBackward& p) {
  const int64_t dim = p.args.in.dim;
  return (dim == 64 || dim == 128 || dim == 256) && p.args.in.x_dtype != GDN_F32 && p.x_vectors &&
         p.gate_vectors && p.dy_vectors && p.dx_vectors && p.dgate_vectors &&
         p.axes.rows < kMaxDivided;
}

template <typename X, typename G>
cudaError_t Launch(const GatedBackward& p, bool early, cudaStream_t stream) {
  const auto launch = [&](int threads, void (*kernel)(GatedBackward)) {
    const dim3 grid(static_cast<unsigned>(Partials(p.args.in)));
    return LaunchMaybeEarly(early, grid, dim3(static_cast<unsigned>(threads)), 0, stream, kernel,
                            p);
  };
  if constexpr (sizeof(X) == 2) {
    if (CoversRows(p)) {
      switch (p.args.in.dim) {
        case 64:
          return launch(kBackwardThreads<64>, BackwardRows<X, G, 64>);
        case 128:
          return launch(kBackwardThreads<128>, BackwardRows<X, G, 128>);
        default:
          return launch(kBackwardThreads<256>, BackwardRows<X, G, 256>);
      }
    }
  }
  constexpr int kBlock = 256;
  return p.args.in.dim <= kStreamsMaxDim
             ? launch(kAnyBackwardThreads<32>, BackwardAnyRows<X, G, 32>)
             : launch(kAnyBackwardThreads<kBlock>, BackwardAnyRows<X, G, kBlock>);
}

GatedBackward Describe(const gdn_exec& exec, const gdn_gated_rms_norm_backward_args& args) {
  GatedBackward p{};
  p.args = args;
  gdn_gated_rms_norm_input& in = p.args.in;
  in.x_strides = UsedStrides(in, in.x_strides);
  in.gate_strides = UsedStrides(in, in.gate_strides);
  p.args.dy_strides = UsedStrides(in, args.dy_strides);
  p.axes = AxesOf(in);
  p.dense =
      IsDense(in, in.x_strides) && IsDense(in, in.gate_strides) && IsDense(in, p.args.dy_strides);
  const int64_t x_size = in.x_dtype == GDN_F32 ? 4 : 2;
  const int64_t gate_size = in.gate_dtype == GDN_F32 ? 4 : 2;
  const auto aligned = [&](const void* data) {
    return in.dim % kVectorElements == 0 && reinterpret_cast<uintptr_t>(data) % 16 == 0;
  };
  p.x_vectors = HasVectors(in, in.x, x_size, in.x_strides);
  p.gate_vectors = HasVectors(in, in.gate, gate_size, in.gate_strides);
  p.dy_vectors = HasVectors(in, args.dy, x_size, p.args.dy_strides);
  p.gamma_vectors = aligned(in.gamma);
  p.dx_vectors = aligned(args.dx);
  p.dgate_vectors = aligned(args.dgate);
  p.partial_rows = PartialRows(in);
  p.partial = static_cast<float*>(exec.workspace);
  return p;
}

}  // namespace

size_t GatedRmsNormBackwardWorkspace(const gdn_gated_rms_norm_backward_args& args) {
  return static_cast<size_t>(Partials(args.in) * args.in.dim) * sizeof(float);
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
    ForElementType(args.in.x_dtype, [&]<typename X>() {
      error = args.in.gate_dtype == GDN_F32 ? Launch<X, float>(p, early, Stream(exec))
                                            : Launch<X, X>(p, early, Stream(exec));
    });
    if (error != cudaSuccess) (void)cudaGetLastError();
    if (const gdn_status status = CheckCuda(kOp, error); status != GDN_OK) return status;
  }
  const PartialSums sums = {static_cast<const float*>(exec.workspace),
                            partials,
                            args.in.dim,
                            args.dgamma,
                            args.in.gamma_dtype,
                            0,
                            nullptr};
  return LaunchPartialSums(kOp, sums, device, Stream(exec));
}

}  // namespace gdn::cuda
