// Which kernels run: few rows take one launch of the skinny product; more take cuBLASLt, with the
// norm before and the gate after it as kernels of their own. With batch_invariant the skinny
// product takes all rows, sixteen at a time: its bits depend on nothing but the row.
#include "gdn/kernels/linear.h"

#include <algorithm>
#include <memory>

#include "kernels/common/convert.h"
#include "kernels/common/linear_plan.h"
#include "kernels/common/validate.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/linear.h"
#include "kernels/cuda/linear_lt.h"

namespace gdn::cuda {
namespace {

constexpr char kOp[] = "linear";
constexpr char kPlanOp[] = "linear_plan_create";
constexpr size_t kAlignment = 256;

// Rows that the wide path takes at once: it bounds the workspace, and more would not be faster.
constexpr int64_t kWideRows = 1024;

struct Plan final : gdn_linear_plan {
  int multiprocessors = 0;
  int shared_bytes = 0;
  int64_t skinny_rows = 0;  // Of one launch.
  LtProducts wide;
};

bool NeedsRowsKernel(const gdn_linear_args& args) {
  return args.norm_weight != nullptr || args.x_dtype != args.plan->shape.weight_dtype;
}

// Row stride of p: whole vectors.
int64_t ProductStride(const gdn_linear_shape& shape) { return (shape.n + 3) / 4 * 4; }

// n, p and cuBLASLt's own workspace, one after the other, for the rows of one pass.
struct WideWorkspace {
  size_t p;
  size_t lt;
  size_t bytes;
};
WideWorkspace WideWorkspaceFor(const Plan& plan, int64_t rows) {
  const gdn_linear_shape& shape = plan.shape;
  const auto aligned = [](int64_t bytes) {
    return (static_cast<size_t>(bytes) + kAlignment - 1) / kAlignment * kAlignment;
  };
  const bool gate = shape.kind == GDN_LINEAR_SILU_MUL;
  WideWorkspace workspace;
  workspace.p = aligned(rows * shape.k * kernels::SizeOf(shape.weight_dtype));
  workspace.lt = workspace.p + (gate ? aligned(rows * ProductStride(shape) * 4) : 0);
  workspace.bytes = workspace.lt + plan.wide.Workspace(rows);
  return workspace;
}

LinearRows RowsOf(const gdn_linear_args& args, int64_t first, int64_t count) {
  LinearRows rows = {};
  rows.x =
      static_cast<const char*>(args.x) + first * args.x_row_stride * kernels::SizeOf(args.x_dtype);
  rows.x_row_stride = args.x_row_stride;
  rows.norm_weight = args.norm_weight;
  rows.norm_eps = args.norm_eps;
  rows.x_is_f32 = args.x_dtype == GDN_F32;
  rows.k = static_cast<int32_t>(args.plan->shape.k);
  rows.inverse_k = 1.0f / static_cast<float>(args.plan->shape.k);
  rows.rows = static_cast<int32_t>(count);
  return rows;
}

LinearOrder OrderOf(const gdn_linear_args& args) {
  return {args.early_start != 0, args.early_start != 0 && args.early_release != 0};
}

char* RowOfY(const gdn_linear_args& args, int64_t row) {
  return static_cast<char*>(args.y) +
         row * args.y_row_stride * kernels::SizeOf(args.plan->shape.y_dtype);
}

gdn_status Skinny(const gdn_exec& exec, const gdn_linear_args& args, const Plan& plan) {
  const gdn_linear_shape& shape = plan.shape;
  LinearSkinnyParams params = {};
  params.weight = args.weight;
  params.y_row_stride = args.y_row_stride;
  params.outputs = static_cast<int32_t>(kernels::LinearOutputs(shape));
  params.y_is_f32 = shape.y_dtype == GDN_F32;
  params.silu = shape.kind == GDN_LINEAR_SILU_MUL;
  params.accumulate = shape.accumulate != 0;
  params.order = OrderOf(args);
  for (int64_t row = 0; row < args.rows; row += plan.skinny_rows) {
    params.rows = RowsOf(args, row, std::min(plan.skinny_rows, args.rows - row));
    params.y = RowOfY(args, row);
    GDN_RETURN_IF_ERROR(
        CheckCuda(kOp, LaunchLinearSkinny(shape.weight_dtype, params, plan.multiprocessors,
                                          plan.shared_bytes, Stream(exec))));
    GDN_RETURN_IF_ERROR(CheckLaunch(kOp));
  }
  return GDN_OK;
}

gdn_status Wide(const gdn_exec& exec, const gdn_linear_args& args, const Plan& plan) {
  const gdn_linear_shape& shape = plan.shape;
  const bool gate = shape.kind == GDN_LINEAR_SILU_MUL;
  const WideWorkspace offsets = WideWorkspaceFor(plan, std::min(args.rows, kWideRows));
  char* const workspace = static_cast<char*>(exec.workspace);
  char* const p = workspace + offsets.p;
  for (int64_t row = 0; row < args.rows; row += kWideRows) {
    const int64_t rows = std::min(kWideRows, args.rows - row);
    LtProduct product = {};
    product.rows = rows;
    product.weight = args.weight;
    if (NeedsRowsKernel(args)) {
      GDN_RETURN_IF_ERROR(
          CheckCuda(kOp, LaunchLinearRows(shape.weight_dtype, RowsOf(args, row, rows),
                                          OrderOf(args), workspace, Stream(exec))));
      GDN_RETURN_IF_ERROR(CheckLaunch(kOp));
      product.x = workspace;
      product.x_row_stride = shape.k;
    } else {
      product.x = RowsOf(args, row, rows).x;
      product.x_row_stride = args.x_row_stride;
    }
    product.y = gate ? p : RowOfY(args, row);
    product.y_row_stride = gate ? ProductStride(shape) : args.y_row_stride;
    GDN_RETURN_IF_ERROR(plan.wide.Run(product, workspace + offsets.lt,
                                      exec.workspace_bytes - offsets.lt, Stream(exec)));
    GDN_RETURN_IF_ERROR(CheckLaunch(kOp));
    if (gate) {
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
  }
  return GDN_OK;
}

bool IsSkinny(const Plan& plan, int64_t rows) {
  return plan.shape.batch_invariant != 0 || rows <= plan.skinny_rows;
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
  GDN_RETURN_IF_ERROR(
      CheckCuda(kPlanOp, PrepareLinearSkinny(shape.weight_dtype, shape.k, plan->shared_bytes)));
  plan->skinny_rows = LinearSkinnyRows(shape.k, plan->shared_bytes);
  GDN_CHECK_ARG(plan->skinny_rows > 0, GDN_UNSUPPORTED_SHAPE,
                "%s: k %lld needs more shared memory than the device's %d bytes a block", kPlanOp,
                static_cast<long long>(shape.k), plan->shared_bytes);
  if (!IsSkinny(*plan, shape.max_rows)) {
    LtShape wide = {};
    wide.n = shape.n;
    wide.k = shape.k;
    wide.dtype = shape.weight_dtype;
    wide.y_dtype = shape.kind == GDN_LINEAR_SILU_MUL ? GDN_F32 : shape.y_dtype;
    wide.accumulate = shape.accumulate != 0;
    wide.min_rows = plan->skinny_rows + 1;
    wide.max_rows = std::min(shape.max_rows, kWideRows);
    GDN_RETURN_IF_ERROR(plan->wide.Init(wide));
  }
  *made = std::move(plan);
  return GDN_OK;
}

size_t LinearWorkspace(const gdn_exec&, const gdn_linear_args& args) {
  const auto& plan = static_cast<const Plan&>(*args.plan);
  if (IsSkinny(plan, args.rows)) return 0;
  return WideWorkspaceFor(plan, std::min(args.rows, kWideRows)).bytes;
}

gdn_status Linear(const gdn_exec& exec, const gdn_linear_args& args) {
  const auto& plan = static_cast<const Plan&>(*args.plan);
  return IsSkinny(plan, args.rows) ? Skinny(exec, args, plan) : Wide(exec, args, plan);
}

}  // namespace gdn::cuda
