#include "gdn/kernels/gated_rms_norm_training.h"

#include "kernels/capi/buffer_checks.h"
#include "kernels/capi/dense_checks.h"
#include "kernels/capi/dispatch.h"

namespace gdn::kernels {
namespace {

constexpr char kForward[] = "gated_rms_norm_forward";
constexpr char kBackward[] = "gated_rms_norm_backward";
constexpr int64_t kMaxDim = 8192;
constexpr int64_t kFp8RowDim = 128;

using Input = gdn_gated_rms_norm_input;

int64_t Rows(const Input& in) { return in.batch * in.seq * in.heads; }

gdn_status CheckExtents(const char* op, const Input& in) {
  GDN_RETURN_IF_ERROR(CheckExtent(op, "batch", in.batch, 0));
  GDN_RETURN_IF_ERROR(CheckExtent(op, "seq", in.seq, 0));
  GDN_RETURN_IF_ERROR(CheckExtent(op, "heads", in.heads, 1));
  GDN_RETURN_IF_ERROR(CheckExtent(op, "dim", in.dim, 1));
  GDN_CHECK_ARG(in.dim <= kMaxDim, GDN_UNSUPPORTED_SHAPE, "%s: dim must be at most %lld, got %lld",
                op, static_cast<long long>(kMaxDim), static_cast<long long>(in.dim));
  // The bytes of a dense FP32 tensor of all rows.
  int64_t product = in.batch;
  GDN_CHECK_ARG(!__builtin_mul_overflow(product, in.seq, &product) &&
                    !__builtin_mul_overflow(product, in.heads, &product) &&
                    !__builtin_mul_overflow(product, in.dim * 4, &product),
                GDN_INVALID_ARGUMENT, "%s: batch * seq * heads * dim is beyond 64 bits", op);
  return GDN_OK;
}

gdn_status CheckTypes(const char* op, const Input& in) {
  GDN_RETURN_IF_ERROR(CheckElementType(op, "x_dtype", in.x_dtype));
  GDN_RETURN_IF_ERROR(CheckElementType(op, "gate_dtype", in.gate_dtype));
  GDN_RETURN_IF_ERROR(CheckElementType(op, "gamma_dtype", in.gamma_dtype));
  GDN_CHECK_ARG(in.gate_dtype == in.x_dtype || in.gate_dtype == GDN_F32, GDN_UNSUPPORTED_TYPE,
                "%s: gate_dtype must be x_dtype (%d) or GDN_F32 (0), got %d", op,
                static_cast<int>(in.x_dtype), static_cast<int>(in.gate_dtype));
  const int activation = EnumValue(in.activation);
  GDN_CHECK_ARG(activation == GDN_GATE_SILU || activation == GDN_GATE_SIGMOID, GDN_INVALID_ARGUMENT,
                "%s: activation must be SILU (0) or SIGMOID (1), got %d", op, activation);
  return GDN_OK;
}

gdn_status CheckView(const char* op, const char* name, const char* strides_name, const void* data,
                     gdn_dtype dtype, const Input& in, const gdn_row_strides& strides,
                     Buffer* buffer) {
  GDN_RETURN_IF_ERROR(CheckPointer(op, name, data));
  GDN_RETURN_IF_ERROR(CheckAligned(op, name, data, SizeOf(dtype)));
  *buffer = {name, data, 0};
  const Axis axes[] = {{"batch", in.batch, strides.batch},
                       {"seq", in.seq, strides.seq},
                       {"head", in.heads, strides.head},
                       {"element", in.dim, strides.element}};
  return ViewBytes(op, strides_name, axes, SizeOf(dtype), &buffer->bytes);
}

gdn_status CheckDense(const char* op, const char* name, const void* data, int64_t size,
                      int64_t count, Buffer* buffer) {
  GDN_RETURN_IF_ERROR(CheckPointer(op, name, data));
  GDN_RETURN_IF_ERROR(CheckAligned(op, name, data, size));
  *buffer = {name, data, size * count};
  return GDN_OK;
}

// An absent (NULL) optional buffer overlaps nothing.
gdn_status CheckOptional(const char* op, const char* name, const void* data, int64_t count,
                         Buffer* buffer) {
  *buffer = {name, nullptr, 0};
  return data == nullptr ? GDN_OK : CheckDense(op, name, data, sizeof(float), count, buffer);
}

gdn_status CheckInputBuffers(const char* op, const Input& in, Buffer* x, Buffer* gate,
                             Buffer* gamma) {
  GDN_RETURN_IF_ERROR(CheckView(op, "x", "x_strides", in.x, in.x_dtype, in, in.x_strides, x));
  GDN_RETURN_IF_ERROR(
      CheckView(op, "gate", "gate_strides", in.gate, in.gate_dtype, in, in.gate_strides, gate));
  return CheckDense(op, "gamma", in.gamma, SizeOf(in.gamma_dtype), in.dim, gamma);
}

gdn_status CheckFp8(const gdn_gated_rms_norm_forward_args& args) {
  const int fp8 = EnumValue(args.fp8);
  GDN_CHECK_ARG(fp8 == GDN_FP8_NONE || fp8 == GDN_FP8_ROW || fp8 == GDN_FP8_STATIC,
                GDN_INVALID_ARGUMENT, "%s: fp8 must be NONE (0), ROW (1) or STATIC (2), got %d",
                kForward, fp8);
  GDN_CHECK_ARG(fp8 != GDN_FP8_ROW || args.in.dim == kFp8RowDim, GDN_UNSUPPORTED_SHAPE,
                "%s: one FP8 scale per row needs dim %lld, got %lld", kForward,
                static_cast<long long>(kFp8RowDim), static_cast<long long>(args.in.dim));
  return GDN_OK;
}

gdn_status CheckForward(const gdn_exec* exec, const gdn_gated_rms_norm_forward_args* args) {
  GDN_RETURN_IF_ERROR(CheckAnyExec(kForward, exec, args));
  const Input& in = args->in;
  GDN_RETURN_IF_ERROR(CheckExtents(kForward, in));
  GDN_RETURN_IF_ERROR(CheckTypes(kForward, in));
  GDN_RETURN_IF_ERROR(CheckEps(kForward, args->eps));
  GDN_RETURN_IF_ERROR(CheckFp8(*args));
  const int64_t rows = Rows(in);
  Buffer inputs[4] = {};
  Buffer outputs[4] = {};
  if (args->fp8 == GDN_FP8_STATIC) {
    GDN_RETURN_IF_ERROR(
        CheckDense(kForward, "fp8_scale", args->fp8_scale, sizeof(float), 1, &inputs[3]));
    GDN_RETURN_IF_ERROR(
        CheckOptional(kForward, "fp8_scale_inv", args->fp8_scale_inv, 1, &outputs[2]));
  }
  GDN_RETURN_IF_ERROR(CheckOptional(kForward, "amax", args->amax, 1, &outputs[3]));
  if (rows > 0) {
    GDN_RETURN_IF_ERROR(CheckInputBuffers(kForward, in, &inputs[0], &inputs[1], &inputs[2]));
    const int64_t y_size = args->fp8 == GDN_FP8_NONE ? SizeOf(in.x_dtype) : 1;
    GDN_RETURN_IF_ERROR(CheckDense(kForward, "y", args->y, y_size, rows * in.dim, &outputs[0]));
    GDN_RETURN_IF_ERROR(CheckOptional(kForward, "rstd", args->rstd, rows, &outputs[1]));
    if (args->fp8 == GDN_FP8_ROW) {
      GDN_RETURN_IF_ERROR(CheckDense(kForward, "fp8_scale_inv", args->fp8_scale_inv, sizeof(float),
                                     rows, &outputs[2]));
    }
  }
  return CheckDisjoint(kForward, inputs, outputs);
}

// Bytes that the back end needs for checked extents.
size_t BackwardWorkspace(const gdn_exec& exec, const gdn_gated_rms_norm_backward_args& args) {
#ifdef GDN_HAS_CUDA
  if (exec.backend == GDN_BACKEND_CUDA) return cuda::GatedRmsNormBackwardWorkspace(args);
#endif
  return exec.backend == GDN_BACKEND_CPU ? cpu::GatedRmsNormBackwardWorkspace(args) : 0;
}

gdn_status CheckBackward(const gdn_exec* exec, const gdn_gated_rms_norm_backward_args* args) {
  const Input& in = args->in;
  GDN_RETURN_IF_ERROR(CheckTypes(kBackward, in));
  const int64_t rows = Rows(in);
  Buffer inputs[5] = {};
  Buffer outputs[4] = {};
  GDN_RETURN_IF_ERROR(
      CheckDense(kBackward, "dgamma", args->dgamma, SizeOf(in.gamma_dtype), in.dim, &outputs[0]));
  if (rows > 0) {
    GDN_RETURN_IF_ERROR(CheckInputBuffers(kBackward, in, &inputs[0], &inputs[1], &inputs[2]));
    GDN_RETURN_IF_ERROR(CheckDense(kBackward, "rstd", args->rstd, sizeof(float), rows, &inputs[3]));
    GDN_RETURN_IF_ERROR(CheckView(kBackward, "dy", "dy_strides", args->dy, in.x_dtype, in,
                                  args->dy_strides, &inputs[4]));
    const int64_t count = rows * in.dim;
    GDN_RETURN_IF_ERROR(
        CheckDense(kBackward, "dx", args->dx, SizeOf(in.x_dtype), count, &outputs[1]));
    GDN_RETURN_IF_ERROR(
        CheckDense(kBackward, "dgate", args->dgate, SizeOf(in.gate_dtype), count, &outputs[2]));
  }
  const size_t workspace = BackwardWorkspace(*exec, *args);
  GDN_RETURN_IF_ERROR(CheckWorkspace(kBackward, *exec, workspace));
  outputs[3] = {"exec.workspace", exec->workspace, static_cast<int64_t>(workspace)};
  return CheckDisjoint(kBackward, inputs, outputs);
}

}  // namespace
}  // namespace gdn::kernels

gdn_status gdn_gated_rms_norm_forward(const gdn_exec* exec,
                                      const gdn_gated_rms_norm_forward_args* args) {
  GDN_RETURN_IF_ERROR(gdn::kernels::CheckForward(exec, args));
  GDN_DISPATCH(exec, args, GatedRmsNormForward);
}

gdn_status gdn_gated_rms_norm_backward_workspace(const gdn_exec* exec,
                                                 const gdn_gated_rms_norm_backward_args* args,
                                                 size_t* bytes) {
  using namespace gdn::kernels;  // NOLINT(build/namespaces): the checks
  GDN_RETURN_IF_ERROR(CheckAnyExec(kBackward, exec, args));
  GDN_RETURN_IF_ERROR(CheckPointer(kBackward, "bytes", bytes));
  GDN_RETURN_IF_ERROR(CheckExtents(kBackward, args->in));
  *bytes = BackwardWorkspace(*exec, *args);
  return GDN_OK;
}

gdn_status gdn_gated_rms_norm_backward(const gdn_exec* exec,
                                       const gdn_gated_rms_norm_backward_args* args) {
  using namespace gdn::kernels;  // NOLINT(build/namespaces): the checks
  GDN_RETURN_IF_ERROR(CheckAnyExec(kBackward, exec, args));
  GDN_RETURN_IF_ERROR(CheckExtents(kBackward, args->in));
  GDN_RETURN_IF_ERROR(CheckBackward(exec, args));
  GDN_DISPATCH(exec, args, GatedRmsNormBackward);
}
