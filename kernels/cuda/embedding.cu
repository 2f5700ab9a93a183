#include "gdn/kernels/embedding.h"

#include <algorithm>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/vector.cuh"

namespace gdn::cuda {
namespace {

constexpr char kOp[] = "embedding";
constexpr int kThreads = 128;
constexpr int32_t kPaddingId = -1;

// Rows along x, columns along y.
template <typename In, typename Out>
__global__ void __launch_bounds__(kThreads)
    Gather(const __grid_constant__ gdn_embedding_args a, bool vectors) {
  const auto* table = static_cast<const In*>(a.table);
  auto* y = static_cast<Out*>(a.y);
  const int64_t first = blockIdx.y * int64_t{kThreads} + threadIdx.x;
  const int64_t step = int64_t{gridDim.y} * kThreads;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const int32_t id = a.ids[row];
    const bool valid = id >= 0 && id < a.vocab;
    const Out filler = Narrow<Out>(id == kPaddingId ? 0.0f : __int_as_float(0x7fffffff));
    const In* from = table + (valid ? id : 0) * a.dim;
    Out* to = y + row * a.y_row_stride;
    if (vectors) {
      for (int64_t i = first; i < a.dim / kVectorElements; i += step) {
        const Vector<In> in = LoadVector(from + i * kVectorElements);
        Vector<Out> out;
#pragma unroll
        for (int j = 0; j < kVectorElements; ++j) {
          out.element[j] = valid ? Narrow<Out>(Widen(in.element[j])) : filler;
        }
        StoreVector(to + i * kVectorElements, out);
      }
    } else {
      for (int64_t i = first; i < a.dim; i += step) {
        to[i] = valid ? Narrow<Out>(Widen(from[i])) : filler;
      }
    }
  }
}

}  // namespace

gdn_status Embedding(const gdn_exec& exec, const gdn_embedding_args& args) {
  if (args.rows == 0) return GDN_OK;
  Device device;
  if (const gdn_status status = CurrentDevice(kOp, &device); status != GDN_OK) return status;
  const bool vectors = IsVectorAligned(args.table, args.dim) &&
                       IsVectorAligned(args.y, args.y_row_stride) &&
                       args.dim % kVectorElements == 0;
  const int64_t columns = vectors ? args.dim / kVectorElements : args.dim;
  const dim3 grid(GridFor(args.rows, 1), std::min(GridFor(columns, kThreads), 1024u));
  ForElementType(args.table_dtype, [&]<typename In>() {
    ForElementType(args.y_dtype, [&]<typename Out>() {
      Gather<In, Out><<<grid, kThreads, 0, Stream(exec)>>>(args, vectors);
    });
  });
  return CheckLaunch(kOp);
}

}  // namespace gdn::cuda
