// The wide product. y^T = w n^T by the matrix instructions of sm_90a, so that the M of an
// instruction, always 64, lies along the weight, and its N along the rows of n, few or many.
//
// A block multiplies 64 rows of the weight (with a gate 32 of gate and 32 of up) by 16 to 256 rows
// of n. Both come by the copy engine through rings of their own in shared memory: the weight's
// fills while the kernel before this one still runs (early_start), and since a block of that one
// and one of this fit into a multiprocessor (WideSharedBytes), the memory never rests. With many
// rows of n what a multiprocessor takes in counts for more: a block then has 128 rows of the
// weight, in two groups of warps, and the multiprocessor for itself.
//
// Blocks of a cluster share what they read: one fetches rows of n, or of the weight, for several.
// Where the weight has few rows the blocks of a cluster divide K, and each adds up some of the
// cluster's results, always in the same order: eight blocks, but unless batch_invariant four of 65
// to 192 rows of n and two of 193 to 256, where clusters share the rows, 64 each.
//
// A norm in two parts (linear.h): the blocks that add to y make n of the next product and sums of
// squares, and that product applies the norm's factors to its sums.
#include "kernels/cuda/linear_wide.cuh"

#include <algorithm>
#include <utility>

namespace gdn::cuda {
namespace linear {
namespace {

// One block a multiprocessor, or two: then one of a product whose blocks have all of K and one of
// a product whose blocks divide it, as they follow each other, but not two of the former, which
// would take twice as long; nor two of those whose clusters of two are one to a multiprocessor.
// Each also takes 1 KiB for the system, its barriers, and up to the alignment of its slots.
constexpr int WideSharedBytes(int groups, int splits) {
  if (groups > 1) return 224 * 1024;
  return (splits <= kTwoSplits ? 119 : 104) * 1024;
}
constexpr int WideBlocksAtOnce(int groups, int splits) {
  constexpr int kMultiprocessor = 228 * 1024;
  return kMultiprocessor / (WideSharedBytes(groups, splits) + 1024);
}
constexpr int WideColumns(int groups) { return groups * kGroupColumns; }
constexpr int WideWeightBytes(int groups) { return WideColumns(groups) * kWideStageBytes; }

// From here on enough blocks of 256 rows are full.
constexpr int64_t kFewestRowsOfLargeBlocks = 768;

int CeilDiv(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

int WeightRows(const LinearWideArgs& args) {
  return static_cast<int>(args.silu ? 2 * args.outputs : args.outputs);
}

// Between these a product that divides K has blocks of 64 rows, and fewer splits.
constexpr int64_t kMostRowsOfMostSplits = 64;
constexpr int64_t kMostRowsOfFewSplits = 192;
constexpr int64_t kMostRowsOfTwoSplits = 256;

int SumsBytes(const LinearWideTiling& tiling) {
  return tiling.splits * WideColumns(tiling.groups) * (tiling.rows / tiling.splits + 2) * 4;
}

}  // namespace

template <typename W, int kRows, bool kGate, int kSplits, int kGroups>
struct WideLauncher {
  static constexpr auto kKernel = WideKernel<W, kRows, kGate, kSplits, kGroups>;

  static cudaError_t Prepare() {
    const cudaError_t error = cudaFuncSetAttribute(
        kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, WideSharedBytes(kGroups, kSplits));
    if (error != cudaSuccess) return error;
    return cudaFuncSetAttribute(kKernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                cudaSharedmemCarveoutMaxShared);
  }

  static cudaError_t Launch(const LinearWideArgs& args, const LinearWideTiling& tiling,
                            const LinearWideParams& params, cudaStream_t stream) {
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = static_cast<unsigned>(tiling.share_n);
    attributes[0].val.clusterDim.y = static_cast<unsigned>(tiling.share_w);
    attributes[0].val.clusterDim.z = static_cast<unsigned>(tiling.splits);
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    const auto whole = [](int count, int size) { return (count + size - 1) / size * size; };
    cudaLaunchConfig_t config = {};
    config.gridDim.x = static_cast<unsigned>(
        whole(CeilDiv(WeightRows(args), WideColumns(kGroups)), tiling.share_n));
    config.gridDim.y = static_cast<unsigned>(whole(CeilDiv(args.rows, kRows), tiling.share_w));
    config.gridDim.z = static_cast<unsigned>(tiling.splits);
    config.blockDim = WideBlock<kGroups>::kThreads;
    config.dynamicSmemBytes = WideSharedBytes(kGroups, kSplits);
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = args.early_start ? 2 : 1;
    return cudaLaunchKernelEx(&config, kKernel, params);
  }
};

// Calls `use` with a launcher for the tiling.
template <typename W, bool kGate, int kSplits, typename Use>
cudaError_t WithLauncher(const LinearWideTiling& tiling, const Use& use) {
  switch (tiling.rows) {
    case 16:
      if constexpr (!SumsInQuads(kSplits)) return use(WideLauncher<W, 16, kGate, kSplits, 1>());
      break;
    case 32:
      if constexpr (!SumsInQuads(kSplits)) return use(WideLauncher<W, 32, kGate, kSplits, 1>());
      break;
    case 64:
      return use(WideLauncher<W, 64, kGate, kSplits, 1>());
    case 128:
      if constexpr (!SumsInQuads(kSplits)) {
        if (tiling.groups == 2) return use(WideLauncher<W, 128, kGate, kSplits, 2>());
        return use(WideLauncher<W, 128, kGate, kSplits, 1>());
      }
      break;
    default:
      // Without room for the partial sums of so many rows.
      if constexpr (kSplits == 1) return use(WideLauncher<W, 256, kGate, kSplits, 2>());
      break;
  }
  return cudaErrorInvalidValue;
}

template <typename W, bool kGate, int kSplits>
cudaError_t PrepareTilings() {
  for (const auto& [rows, groups] :
       {std::pair{16, 1}, {32, 1}, {64, 1}, {128, 1}, {128, 2}, {256, 2}}) {
    if (rows == 256 && kSplits > 1) continue;
    if (SumsInQuads(kSplits) && rows != 64) continue;
    LinearWideTiling tiling = {};
    tiling.rows = rows;
    tiling.groups = groups;
    const cudaError_t error = WithLauncher<W, kGate, kSplits>(
        tiling, [](const auto& launcher) { return launcher.Prepare(); });
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

template <typename W>
cudaError_t Prepare() {
  cudaError_t error = PrepareTilings<W, false, 1>();
  if (error == cudaSuccess) error = PrepareTilings<W, false, kMostSplits>();
  if (error == cudaSuccess) error = PrepareTilings<W, false, kFewSplits>();
  if (error == cudaSuccess) error = PrepareTilings<W, false, kTwoSplits>();
  if (error == cudaSuccess) error = PrepareTilings<W, true, 1>();
  return error;
}

// The weight as the copy engine sees it: with a gate, blocks of eight rows of gate and of up.
cudaError_t EncodeWeight(gdn_dtype dtype, const LinearWideArgs& args,
                         const LinearWideTiling& tiling, CUtensorMap* map) {
  const auto part = static_cast<uint32_t>(WideColumns(tiling.groups) / tiling.share_w);
  if (!args.silu) {
    return EncodeRowsMap(dtype, args.weight, args.k, args.outputs, args.k, part, map);
  }
  const auto k = static_cast<uint64_t>(args.k);
  const auto rows = static_cast<uint64_t>(args.outputs);
  TensorMapShape shape = {};
  shape.rank = 4;
  shape.size = {k, 8, 2, rows / 8};
  shape.stride_bytes = {k * 2, rows * k * 2, 8 * k * 2};
  shape.box = {kWideStage, 8, 2, part / 16};
  return EncodeTensorMap(dtype, args.weight, shape, map);
}

}  // namespace linear

LinearWideTiling ChooseLinearWide(const LinearWideArgs& args, int multiprocessors) {
  using namespace linear;
  LinearWideTiling tiling = {};
  tiling.rows = args.rows <= 16 ? 16 : args.rows <= 32 ? 32 : args.rows <= 64 ? 64 : 128;
  // Where the weight has few rows, K is divided too.
  const bool few = CeilDiv(WeightRows(args), kGroupColumns) * 4 <= multiprocessors;
  tiling.splits = few && !args.silu ? kMostSplits : 1;
  tiling.groups = args.rows > 128 ? 2 : 1;
  if (tiling.splits > 1 && !args.batch_invariant && args.rows > kMostRowsOfMostSplits &&
      args.rows <= kMostRowsOfTwoSplits) {
    tiling.rows = 64;
    tiling.splits = args.rows <= kMostRowsOfFewSplits ? kFewSplits : kTwoSplits;
    tiling.groups = 1;
  }
  if (tiling.splits == 1 && args.rows >= kFewestRowsOfLargeBlocks) tiling.rows = 256;
  tiling.share_n = tiling.splits == 1 && tiling.rows != 128 ? 2 : 1;
  tiling.share_w = tiling.splits == 1 && tiling.rows == 128 && args.rows > 128 ? 2 : 1;

  // The ring of n holds what hides its way from the L2; the weight, which comes from further away,
  // gets the rest, and what it does not need goes back to n.
  const int stages = CeilDiv(CeilDiv(args.k, kWideStage), tiling.splits);
  const int sums = tiling.splits > 1 && !SumsInQuads(tiling.splits) ? SumsBytes(tiling) : 0;
  const int n_bytes = tiling.rows * kWideStageBytes;
  const int w_bytes = WideWeightBytes(tiling.groups);
  const int space = WideSharedBytes(tiling.groups, tiling.splits) - kWideAlignment - sums;
  tiling.n_slots = std::min(stages, tiling.rows == 256   ? 4
                                    : tiling.rows == 128 ? 3 * tiling.groups
                                                         : 6);
  tiling.w_slots = std::min({stages, kMaxWideSlots, (space - tiling.n_slots * n_bytes) / w_bytes});
  tiling.n_slots = std::min({stages, kMaxWideSlots, (space - tiling.w_slots * w_bytes) / n_bytes});
  return tiling;
}

bool LinearWideFillsDevice(const LinearWideArgs& args, int multiprocessors) {
  const LinearWideTiling tiling = ChooseLinearWide(args, multiprocessors);
  const int64_t blocks =
      int64_t{linear::CeilDiv(linear::WeightRows(args), linear::WideColumns(tiling.groups))} *
      linear::CeilDiv(args.rows, tiling.rows) * tiling.splits;
  const int at_once = linear::WideBlocksAtOnce(tiling.groups, tiling.splits);
  return 2 * blocks >= multiprocessors && blocks <= multiprocessors * at_once;
}

cudaError_t PrepareLinearWide(gdn_dtype weight_dtype) {
  const cudaError_t error = PrepareTensorMaps();
  if (error != cudaSuccess) return error;
  return weight_dtype == GDN_BF16 ? linear::Prepare<Bf16>() : linear::Prepare<F16>();
}

cudaError_t LaunchLinearWide(gdn_dtype weight_dtype, const LinearWideArgs& args,
                             const LinearWideTiling& tiling, cudaStream_t stream) {
  using namespace linear;
  LinearWideParams params = {};
  cudaError_t error = EncodeWeight(weight_dtype, args, tiling, &params.weight);
  if (error != cudaSuccess) return error;
  error = EncodeRowsMap(weight_dtype, args.n, args.k, args.rows, args.n_row_stride,
                        tiling.rows / tiling.share_n, &params.n);
  if (error != cudaSuccess) return error;
  params.y = args.y;
  params.y_row_stride = args.y_row_stride;
  params.rows = static_cast<int32_t>(args.rows);
  params.outputs = static_cast<int32_t>(args.outputs);
  params.stages = CeilDiv(args.k, kWideStage);
  params.stages_per_split = CeilDiv(params.stages, tiling.splits);
  params.n_slots = tiling.n_slots;
  params.w_slots = tiling.w_slots;
  // Behind what is sent, which lies where the slots were; and unless the cluster meets before,
  // behind the slots.
  params.sums_offset = SumsBytes(tiling);
  if (!SumsInQuads(tiling.splits)) {
    params.sums_offset =
        std::max(params.sums_offset, tiling.w_slots * WideWeightBytes(tiling.groups) +
                                         tiling.n_slots * tiling.rows * kWideStageBytes);
  }
  params.y_is_f32 = args.y_is_f32;
  params.accumulate = args.accumulate;
  params.y_vectors =
      !args.y_is_f32 && args.y_row_stride % 8 == 0 && reinterpret_cast<uintptr_t>(args.y) % 16 == 0;
  params.squares = args.squares;
  params.square_groups = CeilDiv(args.k, GDN_LINEAR_SQUARES_COLUMNS);
  params.inverse_k = 1.0f / static_cast<float>(args.k);
  params.norm_eps = args.norm_eps;
  params.after_norm = args.after_norm;
  params.after_n = args.after_n;
  params.after_squares = args.after_squares;
  const auto launch = [&](const auto& launcher) {
    return launcher.Launch(args, tiling, params, stream);
  };
  const auto choose = [&]<typename W>() {
    if (args.silu) return WithLauncher<W, true, 1>(tiling, launch);
    if (tiling.splits == kFewSplits) return WithLauncher<W, false, kFewSplits>(tiling, launch);
    if (tiling.splits == kTwoSplits) return WithLauncher<W, false, kTwoSplits>(tiling, launch);
    return tiling.splits > 1 ? WithLauncher<W, false, kMostSplits>(tiling, launch)
                             : WithLauncher<W, false, 1>(tiling, launch);
  };
  return weight_dtype == GDN_BF16 ? choose.operator()<Bf16>() : choose.operator()<F16>();
}

}  // namespace gdn::cuda
