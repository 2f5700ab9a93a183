// Which kernels run. Few rows take one launch of the skinny product, 9 to 128 (with a gate any
// more, and up to 256 where its blocks fill the device once) the wide one, others cuBLASLt, with
// the norm before and, for cuBLASLt, the gate after it as kernels of their own. With
// batch_invariant all rows take the wide product, or where it cannot run the skinny one and the
// tile product, which gives the same bits; so do few rows before sm_90.
#include "gdn/kernels/linear.h"

#include <algorithm>
#include <memory>

#include "kernels/common/convert.h"
#include "kernels/common/linear_plan.h"
#include "kernels/common/validate.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/linear.h"
#include "kernels/cuda/linear_lt.h"
#include "kernels/cuda/linear_wide.h"

namespace gdn::cuda {
namespace {

constexpr char kOp[] = "linear";
constexpr char kPlanOp[] = "linear_plan_create";
constexpr size_t kAlignment = 256;

// Rows that a product takes at once, which bounds the workspace; fewer where p, in FP32, is a part
// of it.
constexpr int64_t kPassRows = 8192;
constexpr int64_t kGatePassRows = 1024;
// Where the wide product is the fastest.
constexpr int64_t kFewestWideRows = 9;
constexpr int64_t kMostWideRows = 128;
constexpr int64_t kMostRowsOfOneFill = 256;
constexpr int64_t kMostWideOutputs = 32768;

struct Plan final : gdn_linear_plan {
  int multiprocessors = 0;
  int shared_bytes = 0;
  int64_t skinny_rows = 0;  // At most that many; 0: none.
  bool wide = false;        // The wide product can take this shape.
  LtProducts lt;
};

enum class Path { kSkinny, kTile, kWide, kLt };

// Where some rows take cuBLASLt all more rows do, on which plans and workspaces rely: of 129 to 256
// rows that fill the device, a whole K has as many blocks for all, and of a divided one R groups of
// weights fill S multiprocessors with 193 rows on if 8 R <= S <= 16 R, and before that, two blocks
// on each, already if 12 R <= 2 S and S <= 24 R.
bool WideIsBest(const Plan& plan, int64_t rows) {
  if (rows < kFewestWideRows || kernels::LinearOutputs(plan.shape) > kMostWideOutputs) return false;
  if (rows <= kMostWideRows || plan.shape.kind == GDN_LINEAR_SILU_MUL) return true;
  LinearWideArgs args = {};
  args.rows = rows;
  args.k = plan.shape.k;
  args.outputs = kernels::LinearOutputs(plan.shape);
  return rows <= kMostRowsOfOneFill && LinearWideFillsDevice(args, plan.multiprocessors);
}

Path PathFor(const Plan& plan, int64_t rows) {
  const bool invariant = plan.shape.batch_invariant != 0;
  if (plan.wide && (invariant || WideIsBest(plan, rows))) return Path::kWide;
  if (rows <= plan.skinny_rows) return Path::kSkinny;
  return invariant || rows <= kLinearSkinnyRows ? Path::kTile : Path::kLt;
}

int64_t PassRows(const Plan& plan, Path path) {
  return path == Path::kLt && plan.shape.kind == GDN_LINEAR_SILU_MUL ? kGatePassRows : kPassRows;
}

bool NeedsRowsKernel(const gdn_linear_args& args) {
  return args.norm_weight != nullptr || args.x_dtype != args.plan->shape.weight_dtype;
}

// Row stride of p: whole vectors.
int64_t ProductStride(const gdn_linear_shape& shape) { return (shape.n + 3) / 4 * 4; }

// n, p and cuBLASLt's own workspace, one after the other, for the rows of one pass of the wide
// paths. What serves some rows serves fewer, whichever path those take.
struct WideWorkspace {
  size_t p;
  size_t lt;
  size_t bytes;
};
WideWorkspace WideWorkspaceFor(const Plan& plan, int64_t call_rows) {
  const gdn_linear_shape& shape = plan.shape;
  const Path path = PathFor(plan, call_rows);
  const int64_t rows = std::min(call_rows, PassRows(plan, path));
  const auto aligned = [](int64_t bytes) {
    return (static_cast<size_t>(bytes) + kAlignment - 1) / kAlignment * kAlignment;
  };
  const bool lt = path == Path::kLt;
  const bool gate = shape.kind == GDN_LINEAR_SILU_MUL;
  WideWorkspace workspace;
  workspace.p = aligned(rows * shape.k * kernels::SizeOf(shape.weight_dtype));
  workspace.lt = workspace.p + (lt && gate ? aligned(rows * ProductStride(shape) * 4) : 0);
  workspace.bytes = workspace.lt + (lt ? plan.lt.Workspace(rows) : 0);
  return workspace;
}

LinearRows RowsOf(const gdn_linear_args& args, int64_t first, int64_t count) {
  const void* const x =
      static_cast<const char*>(args.x) + first * args.x_row_stride * kernels::SizeOf(args.x_dtype);
  return MakeLinearRows(x, args.x_dtype, args.x_row_stride, args.norm_weight, args.norm_eps,
                        args.plan->shape.k, count);
}

char* RowOfY(const gdn_linear_args& args, int64_t row) {
  return static_cast<char*>(args.y) +
         row * args.y_row_stride * kernels::SizeOf(args.plan->shape.y_dtype);
}

gdn_status Skinny(const gdn_exec& exec, const gdn_linear_args& args, const Plan& plan) {
  const gdn_linear_shape& shape = plan.shape;
  LinearSkinnyParams params = {};
  params.rows = RowsOf(args, 0, args.rows);
  params.weight = args.weight;
  params.y = args.y;
  params.y_row_stride = args.y_row_stride;
  params.outputs = static_cast<int32_t>(kernels::LinearOutputs(shape));
  params.y_is_f32 = shape.y_dtype == GDN_F32;
  params.silu = shape.kind == GDN_LINEAR_SILU_MUL;
  params.accumulate = shape.accumulate != 0;
  params.early_start = args.early_start != 0;
  GDN_RETURN_IF_ERROR(
      CheckCuda(kOp, LaunchLinearSkinny(shape.weight_dtype, params, plan.multiprocessors,
                                        plan.shared_bytes, Stream(exec))));
  return CheckLaunch(kOp);
}

// n of some rows: x itself, or what the rows kernel makes of it in the workspace.
struct PreparedRows {
  const void* data;
  int64_t row_stride;
};
gdn_status PrepareRows(const gdn_exec& exec, const gdn_linear_args& args, int64_t first,
                       int64_t count, PreparedRows* n) {
  const gdn_linear_shape& shape = args.plan->shape;
  const LinearRows rows = RowsOf(args, first, count);
  *n = {rows.x, args.x_row_stride};
  if (!NeedsRowsKernel(args)) return GDN_OK;
  *n = {exec.workspace, shape.k};
  GDN_RETURN_IF_ERROR(CheckCuda(kOp, LaunchLinearRows(shape.weight_dtype, rows, exec.workspace,
                                                      args.early_start != 0, Stream(exec))));
  return CheckLaunch(kOp);
}

gdn_status Tile(const gdn_exec& exec, const gdn_linear_args& args, const Plan& plan) {
  const gdn_linear_shape& shape = plan.shape;
  LinearTileParams params = {};
  params.weight = args.weight;
  params.y_row_stride = args.y_row_stride;
  params.k = static_cast<int32_t>(shape.k);
  params.outputs = static_cast<int32_t>(kernels::LinearOutputs(shape));
  params.y_is_f32 = shape.y_dtype == GDN_F32;
  params.silu = shape.kind == GDN_LINEAR_SILU_MUL;
  params.accumulate = shape.accumulate != 0;
  for (int64_t row = 0; row < args.rows; row += kPassRows) {
    const int64_t rows = std::min(kPassRows, args.rows - row);
    PreparedRows n;
    GDN_RETURN_IF_ERROR(PrepareRows(exec, args, row, rows, &n));
    params.n = n.data;
    params.n_row_stride = n.row_stride;
    params.rows = static_cast<int32_t>(rows);
    params.y = RowOfY(args, row);
    GDN_RETURN_IF_ERROR(CheckCuda(
        kOp, LaunchLinearTile(shape.weight_dtype, params, plan.multiprocessors, Stream(exec))));
    GDN_RETURN_IF_ERROR(CheckLaunch(kOp));
  }
  return GDN_OK;
}

gdn_status Wide(const gdn_exec& exec, const gdn_linear_args& args, const Plan& plan) {
  const gdn_linear_shape& shape = plan.shape;
  LinearWideArgs wide = {};
  wide.weight = args.weight;
  wide.y_row_stride = args.y_row_stride;
  wide.k = shape.k;
  wide.outputs = kernels::LinearOutputs(shape);
  wide.y_is_f32 = shape.y_dtype == GDN_F32;
  wide.silu = shape.kind == GDN_LINEAR_SILU_MUL;
  wide.accumulate = shape.accumulate != 0;
  wide.early_start = args.early_start != 0;
  wide.batch_invariant = shape.batch_invariant != 0;
  wide.squares = args.squares;
  wide.norm_eps = args.norm_eps;
  wide.after_norm = args.after_norm;
  wide.after_n = args.after_n;
  wide.after_squares = args.after_squares;
  for (int64_t row = 0; row < args.rows; row += kPassRows) {
    const int64_t rows = std::min(kPassRows, args.rows - row);
    PreparedRows n;
    GDN_RETURN_IF_ERROR(PrepareRows(exec, args, row, rows, &n));
    wide.n = n.data;
    wide.n_row_stride = n.row_stride;
    wide.rows = rows;
    wide.y = RowOfY(args, row);
    GDN_RETURN_IF_ERROR(CheckCuda(
        kOp, LaunchLinearWide(shape.weight_dtype, wide,
                              ChooseLinearWide(wide, plan.multiprocessors), Stream(exec))));
    GDN_RETURN_IF_ERROR(CheckLaunch(kOp));
  }
  return GDN_OK;
}

gdn_status Lt(const gdn_exec& exec, const gdn_linear_args& args, const Plan& plan) {
  const gdn_linear_shape& shape = plan.shape;
  const bool gate = shape.kind == GDN_LINEAR_SILU_MUL;
  const WideWorkspace offsets = WideWorkspaceFor(plan, args.rows);
  char* const workspace = static_cast<char*>(exec.workspace);
  char* const p = workspace + offsets.p;
  const int64_t pass_rows = PassRows(plan, Path::kLt);
  for (int64_t row = 0; row < args.rows; row += pass_rows) {
    const int64_t rows = std::min(pass_rows, args.rows - row);
    PreparedRows n;
    GDN_RETURN_IF_ERROR(PrepareRows(exec, args, row, rows, &n));
    LtProduct product = {};
    product.rows = rows;
    product.x = n.data;
    product.x_row_stride = n.row_stride;
    product.weight = args.weight;
    product.y = gate ? p : RowOfY(args, row);
    product.y_row_stride = gate ? ProductStride(shape) : args.y_row_stride;
    GDN_RETURN_IF_ERROR(plan.lt.Run(product, workspace + offsets.lt,
                                    exec.workspace_bytes - offsets.lt, Stream(exec)));
    GDN_RETURN_IF_ERROR(CheckLaunch(kOp));
    if (!gate) continue;
    LinearGateParams params = {};
    params.p = reinterpret_cast<const float*>(p);
    params.p_row_stride = product.y_row_stride;
    params.y = RowOfY(args, row);
    params.y_row_stride = args.y_row_stride;
    params.y_dtype = shape.y_dtype;
    params.outputs = kernels::LinearOutputs(shape);
    params.rows = rows;
    GDN_RETURN_IF_ERROR(CheckCuda(kOp, LaunchLinearGate(params, Stream(exec))));
  }
  return GDN_OK;
}

}  // namespace

gdn_status MakeLinearPlan(const gdn_linear_shape& shape, std::unique_ptr<gdn_linear_plan>* made) {
  auto plan = std::make_unique<Plan>();
  plan->shape = shape;
  Device device;
  GDN_RETURN_IF_ERROR(CurrentDevice(kPlanOp, &device));
  GDN_CHECK_ARG(device.compute_capability >= 80, GDN_BACKEND_UNAVAILABLE,
                "%s: the device must have compute capability 8.0 or higher, got %d.%d", kPlanOp,
                device.compute_capability / 10, device.compute_capability % 10);
  plan->multiprocessors = device.multiprocessors;
  int index = 0;
  GDN_RETURN_IF_ERROR(CheckCuda(kPlanOp, cudaGetDevice(&index)));
  GDN_RETURN_IF_ERROR(CheckCuda(
      kPlanOp,
      cudaDeviceGetAttribute(&plan->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, index)));
  if (device.compute_capability >= 90) {
    plan->skinny_rows = LinearSkinnyRows(shape.k, plan->shared_bytes);
    GDN_RETURN_IF_ERROR(
        CheckCuda(kPlanOp, PrepareLinearSkinny(shape.weight_dtype, shape.k, plan->shared_bytes)));
  }
  GDN_RETURN_IF_ERROR(CheckCuda(kPlanOp, PrepareLinearTile(shape.weight_dtype)));
  plan->wide = RunsSm90a(device) &&
               (shape.kind != GDN_LINEAR_SILU_MUL || kernels::LinearOutputs(shape) % 8 == 0);
  if (plan->wide) {
    GDN_RETURN_IF_ERROR(CheckCuda(kPlanOp, PrepareLinearWide(shape.weight_dtype)));
  }
  if (PathFor(*plan, shape.max_rows) == Path::kLt) {
    LtShape lt = {};
    lt.n = shape.n;
    lt.k = shape.k;
    lt.dtype = shape.weight_dtype;
    lt.y_dtype = shape.kind == GDN_LINEAR_SILU_MUL ? GDN_F32 : shape.y_dtype;
    lt.accumulate = shape.accumulate != 0;
    lt.min_rows = kLinearSkinnyRows + 1;
    lt.max_rows = std::min(shape.max_rows, PassRows(*plan, Path::kLt));
    GDN_RETURN_IF_ERROR(plan->lt.Init(lt));
  }
  *made = std::move(plan);
  return GDN_OK;
}

size_t LinearWorkspace(const gdn_exec&, const gdn_linear_args& args) {
  const auto& plan = static_cast<const Plan&>(*args.plan);
  return PathFor(plan, args.rows) == Path::kSkinny ? 0 : WideWorkspaceFor(plan, args.rows).bytes;
}

bool LinearSplitsNorm(const gdn_linear_plan& base, int64_t rows) {
  const auto& plan = static_cast<const Plan&>(base);
  // In one pass, for the sums of squares are laid out for the call's rows.
  return rows <= kPassRows && PathFor(plan, rows) == Path::kWide;
}

gdn_status Linear(const gdn_exec& exec, const gdn_linear_args& args) {
  const auto& plan = static_cast<const Plan&>(*args.plan);
  switch (PathFor(plan, args.rows)) {
    case Path::kSkinny:
      return Skinny(exec, args, plan);
    case Path::kTile:
      return Tile(exec, args, plan);
    case Path::kWide:
      return Wide(exec, args, plan);
    case Path::kLt:
      break;
  }
  return Lt(exec, args, plan);
}

}  // namespace gdn::cuda
