#include "gdn/kernels/silu_mul.h"

#include <algorithm>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/math.cuh"
#include "kernels/cuda/vector.cuh"

namespace gdn::cuda {
namespace {

constexpr char kOp[] = "silu_mul";
constexpr int kThreads = 128;

// Rows along x, columns along y. In place is safe: a thread reads its elements before it writes
// them.
template <typename In, typename Out>
__global__ void __launch_bounds__(kThreads)
    Kernel(const __grid_constant__ gdn_silu_mul_args a, bool vectors) {
  const int64_t first = blockIdx.y * int64_t{kThreads} + threadIdx.x;
  const int64_t step = int64_t{gridDim.y} * kThreads;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const In* gate = static_cast<const In*>(a.gate) + row * a.row_stride;
    const In* up = static_cast<const In*>(a.up) + row * a.row_stride;
    Out* y = static_cast<Out*>(a.y) + row * a.y_row_stride;
    if (vectors) {
      for (int64_t i = first; i < a.dim / kVectorElements; i += step) {
        const Vector<In> g = LoadVector(gate + i * kVectorElements);
        const Vector<In> u = LoadVector(up + i * kVectorElements);
        Vector<Out> out;
#pragma unroll
        for (int j = 0; j < kVectorElements; ++j) {
          out.element[j] = Narrow<Out>(Silu(Widen(g.element[j])) * Widen(u.element[j]));
        }
        StoreVector(y + i * kVectorElements, out);
      }
    } else {
      for (int64_t i = first; i < a.dim; i += step) {
        y[i] = Narrow<Out>(Silu(Widen(gate[i])) * Widen(up[i]));
      }
    }
  }
}

}  // namespace

gdn_status SiluMul(const gdn_exec& exec, const gdn_silu_mul_args& args) {
  if (args.rows == 0) return GDN_OK;
  Device device;
  if (const gdn_status status = CurrentDevice(kOp, &device); status != GDN_OK) return status;
  const bool vectors =
      IsVectorAligned(args.gate, args.row_stride) && IsVectorAligned(args.up, args.row_stride) &&
      IsVectorAligned(args.y, args.y_row_stride) && args.dim % kVectorElements == 0;
  const int64_t columns = vectors ? args.dim / kVectorElements : args.dim;
  const dim3 grid(GridFor(args.rows, 1), std::min(GridFor(columns, kThreads), 1024u));
  ForElementType(args.dtype, [&]<typename In>() {
    ForElementType(args.y_dtype, [&]<typename Out>() {
      Kernel<In, Out><<<grid, kThreads, 0, Stream(exec)>>>(args, vectors);
    });
  });
  return CheckLaunch(kOp);
}

}  // namespace gdn::cuda
