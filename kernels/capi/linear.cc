#include "gdn/kernels/linear.h"

#include <memory>
#include <new>

#include "kernels/capi/buffer_checks.h"
#include "kernels/capi/dense_checks.h"
#include "kernels/capi/dispatch.h"
#include "kernels/common/linear_plan.h"

namespace gdn::kernels {
namespace {

constexpr char kOp[] = "linear";
constexpr char kPlanOp[] = "linear_plan_create";
// Keeps N * K * 4 within int64 and refuses absurd requests by name.
constexpr int64_t kMaxWeightExtent = int64_t{1} << 30;

gdn_status CheckBackend(gdn_backend stored) {
  const int backend = EnumValue(stored);
  GDN_CHECK_ARG(backend != GDN_BACKEND_CPU, GDN_BACKEND_UNAVAILABLE,
                "%s: the CPU back end has no linear op; use matmul.h", kPlanOp);
#ifndef GDN_HAS_CUDA
  GDN_CHECK_ARG(backend != GDN_BACKEND_CUDA, GDN_BACKEND_UNAVAILABLE,
                "%s: this build has no CUDA back end (GDN_CUDA=OFF)", kPlanOp);
#endif
  GDN_CHECK_ARG(backend == GDN_BACKEND_REF || backend == GDN_BACKEND_CUDA, GDN_BACKEND_UNAVAILABLE,
                "%s: backend must be REF (0) or CUDA (2), got %d", kPlanOp, backend);
  return GDN_OK;
}

gdn_status CheckPlanShape(const gdn_linear_shape* shape) {
  GDN_RETURN_IF_ERROR(CheckPointer(kPlanOp, "shape", shape));
  const int kind = EnumValue(shape->kind);
  GDN_CHECK_ARG(kind == GDN_LINEAR_PLAIN || kind == GDN_LINEAR_SILU_MUL, GDN_INVALID_ARGUMENT,
                "%s: kind must be PLAIN (0) or SILU_MUL (1), got %d", kPlanOp, kind);
  GDN_CHECK_ARG(shape->n >= 1 && shape->n <= kMaxWeightExtent, GDN_INVALID_ARGUMENT,
                "%s: n must be in 1..2^30, got %lld", kPlanOp, static_cast<long long>(shape->n));
  GDN_CHECK_ARG(kind == GDN_LINEAR_PLAIN || shape->n % 2 == 0, GDN_INVALID_ARGUMENT,
                "%s: n must be even for SILU_MUL (gate rows, then as many up rows), got %lld",
                kPlanOp, static_cast<long long>(shape->n));
  GDN_CHECK_ARG(shape->k >= 1 && shape->k <= kMaxWeightExtent, GDN_INVALID_ARGUMENT,
                "%s: k must be in 1..2^30, got %lld", kPlanOp, static_cast<long long>(shape->k));
  GDN_RETURN_IF_ERROR(CheckElementType(kPlanOp, "weight_dtype", shape->weight_dtype));
  GDN_RETURN_IF_ERROR(CheckElementType(kPlanOp, "y_dtype", shape->y_dtype));
  GDN_CHECK_ARG(shape->y_dtype == GDN_F32 || shape->y_dtype == shape->weight_dtype,
                GDN_INVALID_ARGUMENT, "%s: y_dtype must be GDN_F32 (0) or weight_dtype %d, got %d",
                kPlanOp, static_cast<int>(shape->weight_dtype), static_cast<int>(shape->y_dtype));
  GDN_CHECK_ARG(shape->accumulate == 0 || (kind == GDN_LINEAR_PLAIN && shape->y_dtype == GDN_F32),
                GDN_INVALID_ARGUMENT,
                "%s: accumulate needs kind PLAIN and y_dtype GDN_F32, got kind %d and y_dtype %d",
                kPlanOp, kind, static_cast<int>(shape->y_dtype));
  return CheckExtent(kPlanOp, "max_rows", shape->max_rows, 1);
}

gdn_status CheckCudaShape(const gdn_linear_shape& shape) {
  GDN_CHECK_ARG(shape.weight_dtype != GDN_F32, GDN_UNSUPPORTED_TYPE,
                "%s: on CUDA weight_dtype must be GDN_BF16 (1) or GDN_F16 (2), got GDN_F32",
                kPlanOp);
  GDN_CHECK_ARG(shape.k % 8 == 0 && shape.k <= kLinearMaxCudaK, GDN_UNSUPPORTED_SHAPE,
                "%s: on CUDA k must be a multiple of 8 in 8..%lld, got %lld", kPlanOp,
                static_cast<long long>(kLinearMaxCudaK), static_cast<long long>(shape.k));
  return GDN_OK;
}

// Whether some byte of x [rows, K] is a byte of y [rows, J]. Columns of one wider buffer interleave
// without sharing one.
bool Overlaps(const gdn_linear_args& args) {
  const gdn_linear_shape& shape = args.plan->shape;
  const auto x = reinterpret_cast<uintptr_t>(args.x);
  const auto y = reinterpret_cast<uintptr_t>(args.y);
  const auto x_pitch = static_cast<uintptr_t>(args.x_row_stride * SizeOf(args.x_dtype));
  const auto y_pitch = static_cast<uintptr_t>(args.y_row_stride * SizeOf(shape.y_dtype));
  const auto x_line = static_cast<uintptr_t>(shape.k * SizeOf(args.x_dtype));
  const auto y_line = static_cast<uintptr_t>(LinearOutputs(shape) * SizeOf(shape.y_dtype));
  const auto gaps = static_cast<uintptr_t>(args.rows - 1);
  if (x + gaps * x_pitch + x_line <= y || y + gaps * y_pitch + y_line <= x) return false;
  if (x_pitch != y_pitch) return true;
  const uintptr_t offset = (y % x_pitch + x_pitch - x % x_pitch) % x_pitch;
  return offset < x_line || offset + y_line > x_pitch;
}

gdn_status CheckCall(const gdn_exec* exec, const gdn_linear_args* args) {
  GDN_RETURN_IF_ERROR(CheckAnyExec(kOp, exec, args));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "plan", args->plan));
  const gdn_linear_plan& plan = *args->plan;
  GDN_CHECK_ARG(plan.backend == exec->backend, GDN_INVALID_ARGUMENT,
                "%s: plan must have been made for exec.backend %d, got one made for %d", kOp,
                static_cast<int>(exec->backend), static_cast<int>(plan.backend));
  GDN_CHECK_ARG(args->rows >= 0 && args->rows <= plan.shape.max_rows, GDN_INVALID_ARGUMENT,
                "%s: rows must be in 0..max_rows of the plan, %lld, got %lld", kOp,
                static_cast<long long>(plan.shape.max_rows), static_cast<long long>(args->rows));
  GDN_RETURN_IF_ERROR(CheckElementType(kOp, "x_dtype", args->x_dtype));
  GDN_CHECK_ARG(args->x_dtype == GDN_F32 || args->x_dtype == plan.shape.weight_dtype,
                GDN_INVALID_ARGUMENT, "%s: x_dtype must be GDN_F32 (0) or weight_dtype %d, got %d",
                kOp, static_cast<int>(plan.shape.weight_dtype), static_cast<int>(args->x_dtype));
  GDN_RETURN_IF_ERROR(CheckEps(kOp, args->norm_eps));
  return GDN_OK;
}

bool SplitsNorm(const gdn_linear_plan& plan, [[maybe_unused]] int64_t rows) {
#ifdef GDN_HAS_CUDA
  if (plan.backend == GDN_BACKEND_CUDA) return cuda::LinearSplitsNorm(plan, rows);
#endif
  return plan.backend == GDN_BACKEND_REF;
}

// What after_norm writes meets nothing that the call reads or writes besides.
gdn_status CheckAfterBuffers(const gdn_linear_args& args) {
  const gdn_linear_shape& shape = args.plan->shape;
  const int64_t outputs = LinearOutputs(shape);
  const auto squares_bytes = [&](int64_t columns) {
    return (columns + GDN_LINEAR_SQUARES_COLUMNS - 1) / GDN_LINEAR_SQUARES_COLUMNS * args.rows * 4;
  };
  const Buffer others[] = {
      {"x", args.x, ((args.rows - 1) * args.x_row_stride + shape.k) * SizeOf(args.x_dtype)},
      {"y", args.y, ((args.rows - 1) * args.y_row_stride + outputs) * 4},
      {"squares", args.squares, squares_bytes(shape.k)}};
  const Buffer after[] = {
      {"after_n", args.after_n, args.rows * outputs * SizeOf(shape.weight_dtype)},
      {"after_squares", args.after_squares, squares_bytes(outputs)}};
  return CheckDisjoint(kOp, others, after);
}

gdn_status CheckSplitNorm(const gdn_linear_args& args) {
  if (args.after_norm == nullptr && args.squares == nullptr) return GDN_OK;
  const gdn_linear_shape& shape = args.plan->shape;
  if (args.after_norm != nullptr) {
    GDN_CHECK_ARG(shape.accumulate != 0, GDN_INVALID_ARGUMENT,
                  "%s: after_norm needs a plan with accumulate", kOp);
    GDN_RETURN_IF_ERROR(CheckPointer(kOp, "after_n", args.after_n));
    GDN_RETURN_IF_ERROR(CheckPointer(kOp, "after_squares", args.after_squares));
    GDN_CHECK_ARG(args.plan->backend != GDN_BACKEND_CUDA ||
                      reinterpret_cast<uintptr_t>(args.after_n) % 16 == 0,
                  GDN_INVALID_ARGUMENT, "%s: on CUDA after_n must be 16-byte aligned, got %p", kOp,
                  args.after_n);
    GDN_RETURN_IF_ERROR(CheckAfterBuffers(args));
  }
  if (args.squares != nullptr) {
    GDN_CHECK_ARG(args.norm_weight == nullptr, GDN_INVALID_ARGUMENT,
                  "%s: squares and norm_weight are two ways to norm x: one must be NULL", kOp);
    GDN_CHECK_ARG(args.x_dtype == shape.weight_dtype, GDN_INVALID_ARGUMENT,
                  "%s: with squares x_dtype must be weight_dtype %d, got %d", kOp,
                  static_cast<int>(shape.weight_dtype), static_cast<int>(args.x_dtype));
  }
  GDN_CHECK_ARG(SplitsNorm(*args.plan, args.rows), GDN_UNSUPPORTED_SHAPE,
                "%s: this plan takes no after_norm and no squares at %lld rows (see "
                "gdn_linear_splits_norm)",
                kOp, static_cast<long long>(args.rows));
  return GDN_OK;
}

gdn_status Check(const gdn_exec* exec, const gdn_linear_args* args) {
  GDN_RETURN_IF_ERROR(CheckCall(exec, args));
  if (args->rows == 0) return GDN_OK;
  const gdn_linear_shape& shape = args->plan->shape;
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "x", args->x));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "weight", args->weight));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "y", args->y));
  GDN_RETURN_IF_ERROR(CheckStride(kOp, "x_row_stride", args->x_row_stride, shape.k));
  GDN_RETURN_IF_ERROR(CheckStride(kOp, "y_row_stride", args->y_row_stride, LinearOutputs(shape)));
  if (exec->backend == GDN_BACKEND_CUDA) GDN_RETURN_IF_ERROR(CheckCudaProduct(kOp, *args));
  GDN_CHECK_ARG(!Overlaps(*args), GDN_INVALID_ARGUMENT, "%s: y must not overlap x", kOp);
  return CheckSplitNorm(*args);
}

size_t Workspace([[maybe_unused]] const gdn_exec& exec,
                 [[maybe_unused]] const gdn_linear_args& args) {
#ifdef GDN_HAS_CUDA
  if (exec.backend == GDN_BACKEND_CUDA && args.rows > 0) return cuda::LinearWorkspace(exec, args);
#endif
  return 0;
}

}  // namespace
}  // namespace gdn::kernels

gdn_status gdn_linear_plan_create(gdn_backend backend, const gdn_linear_shape* shape,
                                  gdn_linear_plan** plan) {
  using gdn::kernels::Fail;
  GDN_RETURN_IF_ERROR(gdn::kernels::CheckPointer("linear_plan_create", "plan", plan));
  GDN_RETURN_IF_ERROR(gdn::kernels::CheckBackend(backend));
  GDN_RETURN_IF_ERROR(gdn::kernels::CheckPlanShape(shape));
  try {
    std::unique_ptr<gdn_linear_plan> made;
    if (backend == GDN_BACKEND_REF) {
      made = std::make_unique<gdn_linear_plan>();
    } else {
      GDN_RETURN_IF_ERROR(gdn::kernels::CheckCudaShape(*shape));
#ifdef GDN_HAS_CUDA
      GDN_RETURN_IF_ERROR(gdn::cuda::MakeLinearPlan(*shape, &made));
#endif
    }
    made->backend = backend;
    made->shape = *shape;
    *plan = made.release();
    return GDN_OK;
  } catch (const std::bad_alloc&) {
    return Fail(GDN_DEVICE_ERROR, "linear_plan_create: no host memory for a plan");
  }
}

void gdn_linear_plan_destroy(gdn_linear_plan* plan) { delete plan; }

int32_t gdn_linear_splits_norm(const gdn_linear_plan* plan, int64_t rows) {
  return plan != nullptr && rows >= 1 && rows <= plan->shape.max_rows &&
                 gdn::kernels::SplitsNorm(*plan, rows)
             ? 1
             : 0;
}

gdn_status gdn_linear_workspace(const gdn_exec* exec, const gdn_linear_args* args, size_t* bytes) {
  GDN_RETURN_IF_ERROR(gdn::kernels::CheckCall(exec, args));
  GDN_RETURN_IF_ERROR(gdn::kernels::CheckPointer("linear_workspace", "bytes", bytes));
  *bytes = gdn::kernels::Workspace(*exec, *args);
  return GDN_OK;
}

gdn_status gdn_linear(const gdn_exec* exec, const gdn_linear_args* args) {
  GDN_RETURN_IF_ERROR(gdn::kernels::Check(exec, args));
  if (args->rows == 0) return GDN_OK;
  GDN_RETURN_IF_ERROR(
      gdn::kernels::CheckWorkspace("linear", *exec, gdn::kernels::Workspace(*exec, *args)));
#ifdef GDN_HAS_CUDA
  if (exec->backend == GDN_BACKEND_CUDA) return gdn::cuda::Linear(*exec, *args);
#endif
  return gdn::kernels::CallRef("linear", gdn::ref::Linear, *exec, *args);
}
