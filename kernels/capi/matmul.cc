#include "gdn/kernels/matmul.h"

#include <memory>
#include <new>

#include "kernels/capi/dense_checks.h"
#include "kernels/common/packed_weight.h"

namespace gdn::kernels {
namespace {

constexpr char kOp[] = "matmul";
constexpr char kPackOp[] = "packed_weight_create";
// Keeps N * K * sizeof(float) within int64 and refuses absurd requests by name.
constexpr int64_t kMaxWeightExtent = int64_t{1} << 30;

gdn_status CheckPack(gdn_backend backend, gdn_matmul_math math, int64_t k,
                     const gdn_weight_rows* blocks, int32_t num_blocks, int32_t row_block,
                     int32_t max_threads, gdn_packed_weight** packed, PackRequest* request) {
  GDN_RETURN_IF_ERROR(CheckPointer(kPackOp, "packed", packed));
  const int backend_value = EnumValue(backend);
  GDN_CHECK_ARG(backend_value == GDN_BACKEND_REF || backend_value == GDN_BACKEND_CPU,
                GDN_BACKEND_UNAVAILABLE, "%s: backend must be REF (0) or CPU (1), got %d", kPackOp,
                backend_value);
  const int math_value = EnumValue(math);
  GDN_CHECK_ARG(math_value == GDN_MATH_F32 || math_value == GDN_MATH_BF16, GDN_INVALID_ARGUMENT,
                "%s: math must be F32 (0) or BF16 (1), got %d", kPackOp, math_value);
  GDN_CHECK_ARG(k >= 1 && k <= kMaxWeightExtent, GDN_INVALID_ARGUMENT,
                "%s: k must be in 1..2^30, got %lld", kPackOp, static_cast<long long>(k));
  GDN_RETURN_IF_ERROR(CheckPointer(kPackOp, "blocks", blocks));
  GDN_CHECK_ARG(num_blocks >= 1, GDN_INVALID_ARGUMENT, "%s: num_blocks must be >= 1, got %d",
                kPackOp, num_blocks);
  GDN_CHECK_ARG(row_block >= 0 && row_block <= 65536, GDN_INVALID_ARGUMENT,
                "%s: row_block must be in 0..65536, got %d", kPackOp, row_block);
  GDN_CHECK_ARG(max_threads >= 1 && max_threads <= 1024, GDN_INVALID_ARGUMENT,
                "%s: max_threads must be in 1..1024, got %d", kPackOp, max_threads);
  int64_t n = 0;
  for (int32_t i = 0; i < num_blocks; ++i) {
    const gdn_weight_rows& block = blocks[i];
    GDN_CHECK_ARG(block.data != nullptr, GDN_INVALID_ARGUMENT,
                  "%s: blocks[%d].data must not be NULL", kPackOp, i);
    const int dtype = EnumValue(block.dtype);
    GDN_CHECK_ARG(dtype == GDN_F32 || dtype == GDN_BF16 || dtype == GDN_F16, GDN_INVALID_ARGUMENT,
                  "%s: blocks[%d].dtype must be GDN_F32 (0), GDN_BF16 (1) or GDN_F16 (2), got %d",
                  kPackOp, i, dtype);
    GDN_CHECK_ARG(block.rows >= 1 && block.rows <= kMaxWeightExtent - n, GDN_INVALID_ARGUMENT,
                  "%s: blocks[%d].rows must be >= 1 and all rows together at most 2^30, got %lld",
                  kPackOp, i, static_cast<long long>(block.rows));
    n += block.rows;
  }
  *request = {math, n, k, {blocks, static_cast<size_t>(num_blocks)}, row_block, max_threads};
  return GDN_OK;
}

// Whether some element of x [rows, k] is an element of y [rows, n]. Columns of one wider buffer
// interleave without sharing an element.
bool Overlaps(const gdn_matmul_args& args, int64_t n, int64_t k) {
  const auto x = reinterpret_cast<uintptr_t>(args.x);
  const auto y = reinterpret_cast<uintptr_t>(args.y);
  auto extent = [&](int64_t stride, int64_t columns) {
    return static_cast<uintptr_t>((args.rows - 1) * stride + columns) * sizeof(float);
  };
  if (x + extent(args.x_row_stride, k) <= y || y + extent(args.y_row_stride, n) <= x) return false;
  if (args.x_row_stride != args.y_row_stride) return true;
  const auto pitch = static_cast<uintptr_t>(args.x_row_stride) * sizeof(float);
  const uintptr_t x_column = x % pitch;
  const uintptr_t offset = (y % pitch + pitch - x_column) % pitch;
  return offset < static_cast<uintptr_t>(k) * sizeof(float) ||
         offset + static_cast<uintptr_t>(n) * sizeof(float) > pitch;
}

gdn_status CheckShape(const gdn_exec* exec, const gdn_matmul_args* args) {
  GDN_RETURN_IF_ERROR(CheckExec(kOp, exec, args));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "weight", args->weight));
  GDN_CHECK_ARG(args->weight->backend == exec->backend, GDN_INVALID_ARGUMENT,
                "matmul: weight must have been packed for exec.backend %d, got one packed for %d",
                static_cast<int>(exec->backend), static_cast<int>(args->weight->backend));
  return CheckExtent(kOp, "rows", args->rows, 0);
}

gdn_status Check(const gdn_exec* exec, const gdn_matmul_args* args) {
  GDN_RETURN_IF_ERROR(CheckShape(exec, args));
  if (args->rows == 0) return GDN_OK;
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "x", args->x));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "y", args->y));
  GDN_RETURN_IF_ERROR(CheckStride(kOp, "x_row_stride", args->x_row_stride, args->weight->k));
  GDN_RETURN_IF_ERROR(CheckStride(kOp, "y_row_stride", args->y_row_stride, args->weight->n));
  GDN_CHECK_ARG(!Overlaps(*args, args->weight->n, args->weight->k), GDN_INVALID_ARGUMENT,
                "matmul: y must not overlap x");
  return GDN_OK;
}

size_t Workspace(const gdn_exec& exec, const gdn_matmul_args& args) {
  return exec.backend == GDN_BACKEND_REF || args.rows == 0 ? 0 : cpu::MatmulWorkspace(exec, args);
}

}  // namespace
}  // namespace gdn::kernels

gdn_status gdn_packed_weight_create(gdn_backend backend, gdn_matmul_math math, int64_t k,
                                    const gdn_weight_rows* blocks, int32_t num_blocks,
                                    int32_t row_block, int32_t max_threads,
                                    gdn_packed_weight** packed) {
  gdn::kernels::PackRequest request;
  GDN_RETURN_IF_ERROR(gdn::kernels::CheckPack(backend, math, k, blocks, num_blocks, row_block,
                                              max_threads, packed, &request));
  try {
    std::unique_ptr<gdn_packed_weight> weight =
        backend == GDN_BACKEND_REF ? gdn::ref::PackWeight(request) : gdn::cpu::PackWeight(request);
    if (weight == nullptr) return GDN_DEVICE_ERROR;
    *packed = weight.release();
    return GDN_OK;
  } catch (const std::bad_alloc&) {
    return gdn::kernels::Fail(GDN_DEVICE_ERROR,
                              "packed_weight_create: no memory for a packed weight of %lld x %lld",
                              static_cast<long long>(request.n), static_cast<long long>(k));
  }
}

void gdn_packed_weight_destroy(gdn_packed_weight* packed) { delete packed; }

size_t gdn_packed_weight_bytes(const gdn_packed_weight* packed) {
  return packed == nullptr ? 0 : packed->bytes;
}

const char* gdn_packed_weight_kind(const gdn_packed_weight* packed) {
  return packed == nullptr ? "" : packed->kind;
}

gdn_status gdn_matmul_workspace(const gdn_exec* exec, const gdn_matmul_args* args, size_t* bytes) {
  GDN_RETURN_IF_ERROR(gdn::kernels::CheckShape(exec, args));
  GDN_RETURN_IF_ERROR(gdn::kernels::CheckPointer("matmul_workspace", "bytes", bytes));
  *bytes = gdn::kernels::Workspace(*exec, *args);
  return GDN_OK;
}

gdn_status gdn_matmul(const gdn_exec* exec, const gdn_matmul_args* args) {
  GDN_RETURN_IF_ERROR(gdn::kernels::Check(exec, args));
  if (args->rows == 0) return GDN_OK;
  GDN_RETURN_IF_ERROR(
      gdn::kernels::CheckWorkspace("matmul", *exec, gdn::kernels::Workspace(*exec, *args)));
  return exec->backend == GDN_BACKEND_REF ? gdn::ref::Matmul(*exec, *args)
                                          : gdn::cpu::Matmul(*exec, *args);
}
