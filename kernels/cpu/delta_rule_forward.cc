// The training forward on the CPU: the norm, then the chunked prefill on dense states.
#include "gdn/kernels/delta_rule_forward.h"

#include <algorithm>

#include "gdn/kernels/cpu_pool.h"
#include "gdn/kernels/delta_rule.h"
#include "gdn/kernels/l2_norm.h"
#include "kernels/common/convert.h"
#include "kernels/common/rule_args.h"

namespace gdn::cpu {

namespace {

constexpr size_t kAlignment = 64;

size_t RoundUp(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

size_t IndexBytes(const gdn_delta_rule_forward_args& args) {
  return RoundUp(static_cast<size_t>(args.sequences) * sizeof(int64_t));
}

size_t StateBytes(const gdn_delta_rule_forward_args& args) {
  return RoundUp(static_cast<size_t>(args.sequences * kernels::StateSize(args)) * sizeof(float));
}

// The heads of tokens [begin, end).
void Normalise(const gdn_delta_rule_forward_args& args, const void* x, int64_t token_stride,
               void* x_hat, float* rstd, int64_t begin, int64_t end) {
  const int64_t element = kernels::SizeOf(args.qkv_dtype);
  gdn_l2_norm_args norm{};
  norm.rows = args.key_heads;
  norm.dim = norm.x_row_stride = norm.y_row_stride = args.key_dim;
  norm.x_dtype = norm.y_dtype = args.qkv_dtype;
  norm.eps = 1e-6f;
  norm.scale = 1.0f;
  const gdn_exec inline_exec{GDN_BACKEND_CPU, nullptr, nullptr, 0, nullptr};
  for (int64_t t = begin; t < end; ++t) {
    norm.x = static_cast<const char*>(x) + t * token_stride * element;
    norm.y = static_cast<char*>(x_hat) + t * args.key_heads * args.key_dim * element;
    norm.rstd = rstd + t * args.key_heads;
    L2Norm(inline_exec, norm);
  }
}

}  // namespace

size_t DeltaRuleForwardWorkspace(const gdn_exec& exec, const gdn_delta_rule_forward_args& args) {
  if (args.sequences == 0) return 0;
  return IndexBytes(args) + StateBytes(args) +
         DeltaRulePrefillWorkspace(exec, kernels::PrefillArgs(args));
}

gdn_status DeltaRuleForward(const gdn_exec& exec, const gdn_delta_rule_forward_args& args) {
  if (args.sequences == 0) return GDN_OK;
  if (args.use_qk_l2norm != 0) {
    ParallelFor(exec.pool, args.cu_seqlens[args.sequences], 8,
                [&](int64_t begin, int64_t end, int32_t) {
                  Normalise(args, args.q, args.q_token_stride, args.q_hat, args.q_rstd, begin, end);
                  Normalise(args, args.k, args.k_token_stride, args.k_hat, args.k_rstd, begin, end);
                });
  }
  auto* scratch = static_cast<char*>(exec.workspace);
  auto* indices = reinterpret_cast<int64_t*>(scratch);
  for (int64_t i = 0; i < args.sequences; ++i) indices[i] = i;
  // The final states are computed where they are wanted, starting as the initial ones.
  float* states = args.final_state != nullptr
                      ? args.final_state
                      : reinterpret_cast<float*>(scratch + IndexBytes(args));
  const int64_t size = args.sequences * kernels::StateSize(args);
  if (args.initial_state != nullptr) {
    std::copy_n(args.initial_state, size, states);
  } else {
    std::fill_n(states, size, 0.0f);
  }
  gdn_delta_rule_args prefill = kernels::PrefillArgs(args);
  prefill.state = states;
  prefill.read_index = prefill.write_index = indices;
  gdn_exec rest = exec;
  const size_t used = IndexBytes(args) + StateBytes(args);
  rest.workspace = scratch + used;
  rest.workspace_bytes = exec.workspace_bytes - used;
  return DeltaRulePrefill(rest, prefill);
}

}  // namespace gdn::cpu
