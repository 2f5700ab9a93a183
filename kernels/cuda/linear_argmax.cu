// The head without logits in memory, on sm_90a. y^T = w n^T as in linear_wide.cu, but n, of few
// rows, stays in shared memory as a whole, and one block on each multiprocessor walks over tiles of
// the weight, whose ring is filled while the kernel before this one still runs (early_start). A
// thread keeps maximum, sum of exponentials and place of the largest of its rows across all tiles,
// so that a tile's sums never leave the registers. For more rows, or longer ones, see
// linear_argmax_many.cuh.
#include "kernels/cuda/linear_argmax.cuh"

#include <algorithm>

#include "kernels/common/convert.h"
#include "kernels/common/validate.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/linear.h"
#include "kernels/cuda/linear_argmax_many.cuh"
#include "kernels/cuda/tensor_map.h"

namespace gdn::cuda {
namespace {

using namespace argmax;

constexpr char kOp[] = "linear_argmax";
// The barriers and what the warps find lie beside it.
constexpr int kSharedBytes = 216 * 1024;
constexpr int kMostPanelBytes = 128 * 1024;
constexpr int64_t kMostFewRows = 64;
constexpr int64_t kMostOutputs = int64_t{1} << 30;  // Rows of tiles past the last stay 32 bits.
constexpr size_t kWorkspaceAlignment = 256;

// Rows of n of a block.
int TileRows(int64_t rows) { return rows <= 16 ? 16 : rows <= 32 ? 32 : 64; }
int64_t Stages(int64_t k) { return (k + kStage - 1) / kStage; }
int64_t PanelBytes(const gdn_linear_argmax_args& args) {
  return Stages(args.k) * kStage * 2 * TileRows(args.rows);
}
bool AreFew(const gdn_linear_argmax_args& args) {
  return args.rows <= kMostFewRows && PanelBytes(args) <= kMostPanelBytes;
}
// Rows of n that a block of many takes.
int ManyRows(int64_t rows) {
  return rows <= ManyShape<1>::kRows ? ManyShape<1>::kRows : kMostManyRows;
}

gdn_status CheckShape(const gdn_linear_argmax_args& args, Device* device) {
  GDN_RETURN_IF_ERROR(CurrentDevice(kOp, device));
  GDN_CHECK_ARG(RunsSm90a(*device), GDN_UNSUPPORTED_SHAPE,
                "%s: needs a build for 90a and compute capability 9.0, got %d.%d; use linear.h and "
                "sampling.h",
                kOp, device->compute_capability / 10, device->compute_capability % 10);
  GDN_CHECK_ARG(args.weight_dtype != GDN_F32, GDN_UNSUPPORTED_TYPE,
                "%s: on CUDA weight_dtype must be GDN_BF16 (1) or GDN_F16 (2), got GDN_F32", kOp);
  GDN_CHECK_ARG(args.k % 8 == 0, GDN_UNSUPPORTED_SHAPE,
                "%s: on CUDA k must be a multiple of 8, got %lld", kOp,
                static_cast<long long>(args.k));
  GDN_CHECK_ARG(args.n <= kMostOutputs, GDN_UNSUPPORTED_SHAPE,
                "%s: on CUDA n must be at most %lld, got %lld", kOp,
                static_cast<long long>(kMostOutputs), static_cast<long long>(args.n));
  GDN_CHECK_ARG(args.rows <= kMostManyRows, GDN_UNSUPPORTED_SHAPE,
                "%s: on CUDA rows must be at most %d, got %lld; use linear.h and sampling.h", kOp,
                kMostManyRows, static_cast<long long>(args.rows));
  return GDN_OK;
}

struct Workspace {
  size_t parts;  // Where they begin, behind n.
  size_t bytes;
};
Workspace WorkspaceFor(const gdn_linear_argmax_args& args, const Device& device) {
  const auto n = static_cast<size_t>(args.rows * args.k * 2);
  Workspace workspace;
  workspace.parts = (n + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
  workspace.bytes = workspace.parts + static_cast<size_t>(args.rows) *
                                          static_cast<size_t>(device.multiprocessors) *
                                          sizeof(ArgmaxPart);
  return workspace;
}

struct Attributes {
  cudaLaunchAttribute list[2];
};
cudaLaunchConfig_t Config(int64_t blocks, int threads, size_t shared, cudaStream_t stream,
                          Attributes* attributes, bool early_start) {
  cudaLaunchAttribute& early = attributes->list[0];
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = early_start ? 1 : 0;
  cudaLaunchConfig_t config = {};
  config.gridDim = static_cast<unsigned>(blocks);
  config.blockDim = static_cast<unsigned>(threads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = attributes->list;
  config.numAttrs = 1;
  return config;
}

template <typename W, int kRows>
cudaError_t LaunchProduct(const LinearArgmaxParams& params, int64_t blocks, bool early_start,
                          cudaStream_t stream) {
  const cudaError_t error = AllowSharedMemory<ArgmaxKernel<W, kRows>>(kSharedBytes, true);
  if (error != cudaSuccess) return error;
  Attributes attributes = {};
  const cudaLaunchConfig_t config =
      Config(blocks, kThreads, kSharedBytes, stream, &attributes, early_start);
  return cudaLaunchKernelEx(&config, ArgmaxKernel<W, kRows>, params);
}

template <typename W, int kBlocks>
cudaError_t LaunchMany(const LinearArgmaxParams& params, int64_t blocks, bool early_start,
                       cudaStream_t stream) {
  const cudaError_t error = AllowSharedMemory<ArgmaxManyKernel<W, kBlocks>>(kManySharedBytes, true);
  if (error != cudaSuccess) return error;
  Attributes attributes = {};
  cudaLaunchConfig_t config =
      Config(blocks, kManyThreads, kManySharedBytes, stream, &attributes, early_start);
  attributes.list[1].id = cudaLaunchAttributeClusterDimension;
  attributes.list[1].val.clusterDim = {kPair, 1, 1};
  config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, ArgmaxManyKernel<W, kBlocks>, params);
}

template <typename W>
cudaError_t LaunchProduct(const gdn_linear_argmax_args& args, const LinearArgmaxParams& params,
                          int64_t blocks, bool early_start, cudaStream_t stream) {
  if (!AreFew(args)) {
    return ManyRows(args.rows) == kMostManyRows
               ? LaunchMany<W, 2>(params, blocks, early_start, stream)
               : LaunchMany<W, 1>(params, blocks, early_start, stream);
  }
  switch (TileRows(args.rows)) {
    case 16:
      return LaunchProduct<W, 16>(params, blocks, early_start, stream);
    case 32:
      return LaunchProduct<W, 32>(params, blocks, early_start, stream);
    default:
      return LaunchProduct<W, 64>(params, blocks, early_start, stream);
  }
}

}  // namespace

gdn_status LinearArgmaxWorkspace(const gdn_exec&, const gdn_linear_argmax_args& args,
                                 size_t* bytes) {
  Device device;
  GDN_RETURN_IF_ERROR(CheckShape(args, &device));
  *bytes = WorkspaceFor(args, device).bytes;
  return GDN_OK;
}

gdn_status LinearArgmax(const gdn_exec& exec, const gdn_linear_argmax_args& args) {
  Device device;
  GDN_RETURN_IF_ERROR(CheckShape(args, &device));
  GDN_RETURN_IF_ERROR(CheckCuda(kOp, PrepareTensorMaps()));
  const cudaStream_t stream = Stream(exec);
  const Workspace workspace = WorkspaceFor(args, device);
  const bool early_start = args.early_start != 0;

  const void* n = args.x;
  int64_t n_row_stride = args.x_row_stride;
  const bool makes_n = args.norm_weight != nullptr || args.x_dtype != args.weight_dtype;
  if (makes_n) {
    const LinearRows rows = MakeLinearRows(args.x, args.x_dtype, args.x_row_stride,
                                           args.norm_weight, args.norm_eps, args.k, args.rows);
    n = exec.workspace;
    n_row_stride = args.k;
    GDN_RETURN_IF_ERROR(CheckCuda(
        kOp, LaunchLinearRows(args.weight_dtype, rows, exec.workspace, early_start, stream)));
    GDN_RETURN_IF_ERROR(CheckLaunch(kOp));
  }

  LinearArgmaxParams params = {};
  const bool few = AreFew(args);
  const bool largest = ManyRows(args.rows) == kMostManyRows;
  const int weight_rows = few       ? kColumns
                          : largest ? ManyShape<2>::kColumns
                                    : ManyShape<1>::kColumns;
  const int n_rows = few ? TileRows(args.rows) : ManyRows(args.rows) / kPair;
  GDN_RETURN_IF_ERROR(CheckCuda(kOp, EncodeRowsMap(args.weight_dtype, args.weight, args.k, args.n,
                                                   args.k, weight_rows, &params.weight)));
  GDN_RETURN_IF_ERROR(CheckCuda(kOp, EncodeRowsMap(args.weight_dtype, n, args.k, args.rows,
                                                   n_row_stride, n_rows, &params.n)));
  params.rows = static_cast<int32_t>(args.rows);
  params.outputs = static_cast<int32_t>(args.n);
  params.stages = static_cast<int32_t>(Stages(args.k));
  constexpr int64_t kSpace = kSharedBytes - kAlignment;
  const int64_t slots =
      few       ? std::min<int64_t>(kMaxSlots, (kSpace - PanelBytes(args)) / kWeightBytes)
      : largest ? ManyShape<2>::kSlots
                : ManyShape<1>::kSlots;
  params.w_slots = static_cast<int32_t>(slots);
  params.parts =
      reinterpret_cast<ArgmaxPart*>(static_cast<char*>(exec.workspace) + workspace.parts);
  const int64_t blocks = device.multiprocessors / kPair * kPair;
  GDN_RETURN_IF_ERROR(CheckCuda(
      kOp, args.weight_dtype == GDN_BF16
               ? LaunchProduct<Bf16>(args, params, blocks, early_start || makes_n, stream)
               : LaunchProduct<F16>(args, params, blocks, early_start || makes_n, stream)));
  GDN_RETURN_IF_ERROR(CheckLaunch(kOp));

  Attributes attributes = {};
  const cudaLaunchConfig_t join =
      Config((args.rows + kJoinRows - 1) / kJoinRows, 32 * kJoinRows, 0, stream, &attributes, true);
  GDN_RETURN_IF_ERROR(CheckCuda(
      kOp, cudaLaunchKernelEx(&join, JoinKernel, static_cast<const ArgmaxPart*>(params.parts),
                              static_cast<int>(blocks), static_cast<int>(args.rows), args.position,
                              args.token, args.logprob)));
  return CheckLaunch(kOp);
}

}  // namespace gdn::cuda
