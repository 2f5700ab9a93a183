#include "gdn/kernels/gdn2_gates.h"

#include <cmath>
#include <initializer_list>

#include "kernels/capi/dense_checks.h"
#include "kernels/capi/dispatch.h"

namespace {

using namespace gdn::kernels;  // NOLINT(build/namespaces): the checks

// Bytes that the back end needs for a checked shape.
size_t Workspace([[maybe_unused]] const gdn_exec& exec,
                 [[maybe_unused]] const gdn2_gates_backward_args& args) {
#ifdef GDN_HAS_CUDA
  if (exec.backend == GDN_BACKEND_CUDA) return gdn::cuda::Gdn2GatesBackwardWorkspace(args);
#endif
  return 0;
}

gdn_status CheckShape(const char* op, const gdn2_gates_args& args) {
  GDN_RETURN_IF_ERROR(CheckExtent(op, "tokens", args.tokens, 0));
  GDN_RETURN_IF_ERROR(CheckExtent(op, "gate_heads", args.gate_heads, 1));
  GDN_RETURN_IF_ERROR(CheckExtent(op, "key_dim", args.key_dim, 1));
  GDN_RETURN_IF_ERROR(CheckExtent(op, "write_width", args.write_width, 1));
  GDN_CHECK_ARG(args.key_dim <= 256, GDN_UNSUPPORTED_SHAPE,
                "%s: key_dim must be in 1..256, got %lld", op,
                static_cast<long long>(args.key_dim));
  return CheckElementType(op, "fbw_dtype", args.fbw_dtype);
}

gdn_status CheckInputs(const char* op, const gdn2_gates_args& args) {
  GDN_RETURN_IF_ERROR(CheckShape(op, args));
  const int64_t width = args.gate_heads * args.key_dim;
  GDN_RETURN_IF_ERROR(CheckStride(op, "f_token_stride", args.f_token_stride, width));
  GDN_RETURN_IF_ERROR(CheckStride(op, "b_token_stride", args.b_token_stride, width));
  GDN_RETURN_IF_ERROR(CheckStride(op, "w_token_stride", args.w_token_stride, args.write_width));
  const int decay = EnumValue(args.decay);
  GDN_CHECK_ARG(decay == GDN2_DECAY_SOFTPLUS || decay == GDN2_DECAY_BOUNDED, GDN_INVALID_ARGUMENT,
                "%s: decay must be SOFTPLUS (0) or BOUNDED (1), got %d", op, decay);
  if (decay == GDN2_DECAY_BOUNDED) {
    GDN_CHECK_ARG(args.lower_bound >= -5.0f && args.lower_bound < 0.0f, GDN_INVALID_ARGUMENT,
                  "%s: lower_bound must be in [-5, 0), got %g", op,
                  static_cast<double>(args.lower_bound));
  } else {
    GDN_RETURN_IF_ERROR(CheckPointer(op, "a_log", args.a_log));
  }
  GDN_CHECK_ARG(std::isfinite(args.erase_scale), GDN_INVALID_ARGUMENT,
                "%s: erase_scale must be finite, got %g", op,
                static_cast<double>(args.erase_scale));
  if (args.tokens == 0) return GDN_OK;
  GDN_RETURN_IF_ERROR(CheckPointer(op, "f", args.f));
  GDN_RETURN_IF_ERROR(CheckPointer(op, "b", args.b));
  return CheckPointer(op, "w", args.w);
}

gdn_status CheckNoOverlap(const char* op, const gdn2_gates_args& in,
                          std::initializer_list<const void*> outputs) {
  for (const void* output : outputs) {
    GDN_CHECK_ARG(output != in.f && output != in.b && output != in.w, GDN_INVALID_ARGUMENT,
                  "%s: outputs must not overlap f, b or w", op);
  }
  return GDN_OK;
}

gdn_status Check(const char* op, const gdn2_gates_args& args) {
  GDN_RETURN_IF_ERROR(CheckInputs(op, args));
  GDN_RETURN_IF_ERROR(CheckElementType(op, "gate_dtype", args.gate_dtype));
  if (args.tokens == 0) return GDN_OK;
  GDN_RETURN_IF_ERROR(CheckPointer(op, "g", args.g));
  GDN_RETURN_IF_ERROR(CheckPointer(op, "erase", args.erase));
  GDN_RETURN_IF_ERROR(CheckPointer(op, "write", args.write));
  return CheckNoOverlap(op, args, {args.g, args.erase, args.write});
}

gdn_status CheckBackwardShape(const char* op, const gdn2_gates_args& args) {
  GDN_RETURN_IF_ERROR(CheckShape(op, args));
  // The workspace grows with tokens * gate_heads * key_dim.
  GDN_CHECK_ARG(args.gate_heads <= 65536, GDN_UNSUPPORTED_SHAPE,
                "%s: gate_heads must be in 1..65536, got %lld", op,
                static_cast<long long>(args.gate_heads));
  return GDN_OK;
}

gdn_status CheckBackward(const char* op, const gdn2_gates_backward_args& args) {
  GDN_RETURN_IF_ERROR(CheckBackwardShape(op, args.forward));
  GDN_RETURN_IF_ERROR(CheckInputs(op, args.forward));
  if (args.forward.tokens == 0) return GDN_OK;
  GDN_RETURN_IF_ERROR(CheckPointer(op, "d_g", args.d_g));
  GDN_RETURN_IF_ERROR(CheckPointer(op, "d_erase", args.d_erase));
  GDN_RETURN_IF_ERROR(CheckPointer(op, "d_write", args.d_write));
  GDN_RETURN_IF_ERROR(CheckPointer(op, "d_f", args.d_f));
  GDN_RETURN_IF_ERROR(CheckPointer(op, "d_b", args.d_b));
  GDN_RETURN_IF_ERROR(CheckPointer(op, "d_w", args.d_w));
  return CheckNoOverlap(op, args.forward, {args.d_f, args.d_b, args.d_w});
}

}  // namespace

gdn_status gdn_gdn2_gates(const gdn_exec* exec, const gdn2_gates_args* args) {
  constexpr char kOp[] = "gdn2_gates";
  GDN_RETURN_IF_ERROR(CheckAnyExec(kOp, exec, args));
  GDN_RETURN_IF_ERROR(Check(kOp, *args));
  GDN_DISPATCH(exec, args, Gdn2Gates);
}

gdn_status gdn_gdn2_gates_backward_workspace(const gdn_exec* exec,
                                             const gdn2_gates_backward_args* args, size_t* bytes) {
  constexpr char kOp[] = "gdn2_gates_backward_workspace";
  GDN_RETURN_IF_ERROR(CheckAnyExec(kOp, exec, args));
  GDN_RETURN_IF_ERROR(CheckPointer(kOp, "bytes", bytes));
  GDN_RETURN_IF_ERROR(CheckBackwardShape(kOp, args->forward));
  *bytes = Workspace(*exec, *args);
  return GDN_OK;
}

gdn_status gdn_gdn2_gates_backward(const gdn_exec* exec, const gdn2_gates_backward_args* args) {
  constexpr char kOp[] = "gdn2_gates_backward";
  GDN_RETURN_IF_ERROR(CheckAnyExec(kOp, exec, args));
  GDN_RETURN_IF_ERROR(CheckBackward(kOp, *args));
  GDN_RETURN_IF_ERROR(CheckWorkspace(kOp, *exec, Workspace(*exec, *args)));
  GDN_DISPATCH(exec, args, Gdn2GatesBackward);
}
