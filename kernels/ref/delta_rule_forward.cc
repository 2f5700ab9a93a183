#include "gdn/kernels/delta_rule_forward.h"

#include <array>
#include <cmath>

#include "kernels/common/convert.h"
#include "kernels/common/rule_args.h"

namespace gdn::ref {

using kernels::Load;
using kernels::Store;

namespace {

constexpr int64_t kMaxKeyDim = 256;
using KeyVector = std::array<double, kMaxKeyDim>;

// Normalises one head of q or k into its saved form.
void Normalise(const gdn_delta_rule_forward_args& args, const void* x, int64_t offset, void* x_hat,
               float* rstd, int64_t row) {
  double sum = 0.0;
  for (int64_t i = 0; i < args.key_dim; ++i) {
    const double value = Load(x, args.qkv_dtype, offset + i);
    sum += value * value;
  }
  const double factor = 1.0 / std::sqrt(sum + static_cast<double>(1e-6f));
  for (int64_t i = 0; i < args.key_dim; ++i) {
    const double value = Load(x, args.qkv_dtype, offset + i);
    Store(x_hat, args.qkv_dtype, row * args.key_dim + i, static_cast<float>(value * factor));
  }
  rstd[row] = static_cast<float>(factor);
}

// Row v of the state of value head hv over one sequence.
void StateRow(const gdn_delta_rule_forward_args& args, int64_t n, int64_t hv, int64_t v) {
  const int64_t K = args.key_dim;
  const int64_t h = hv / (args.value_heads / args.key_heads);
  const bool saved = args.use_qk_l2norm != 0;
  const double scale = kernels::RuleScale(args.scale, K);
  const int64_t row = ((n * args.value_heads + hv) * args.value_dim + v) * K;
  KeyVector s{};
  for (int64_t i = 0; i < K && args.initial_state != nullptr; ++i)
    s[i] = args.initial_state[row + i];
  for (int64_t t = args.cu_seqlens[n]; t < args.cu_seqlens[n + 1]; ++t) {
    const void* q = saved ? args.q_hat : args.q;
    const void* k = saved ? args.k_hat : args.k;
    const int64_t q_at = saved ? (t * args.key_heads + h) * K : t * args.q_token_stride + h * K;
    const int64_t k_at = saved ? (t * args.key_heads + h) * K : t * args.k_token_stride + h * K;
    const double decay = std::exp(static_cast<double>(args.g[t * args.value_heads + hv]));
    double predicted = 0.0;
    for (int64_t i = 0; i < K; ++i) {
      s[i] *= decay;
      predicted += s[i] * static_cast<double>(Load(k, args.qkv_dtype, k_at + i));
    }
    const double value =
        Load(args.v, args.qkv_dtype, t * args.v_token_stride + hv * args.value_dim + v);
    const double u =
        static_cast<double>(args.beta[t * args.value_heads + hv]) * (value - predicted);
    double o = 0.0;
    for (int64_t i = 0; i < K; ++i) {
      s[i] += u * static_cast<double>(Load(k, args.qkv_dtype, k_at + i));
      o += s[i] * scale * static_cast<double>(Load(q, args.qkv_dtype, q_at + i));
    }
    Store(args.o, args.o_dtype, t * args.o_token_stride + hv * args.value_dim + v,
          static_cast<float>(o));
  }
  for (int64_t i = 0; i < K && args.final_state != nullptr; ++i) {
    args.final_state[row + i] = static_cast<float>(s[i]);
  }
}

}  // namespace

gdn_status DeltaRuleForward(const gdn_exec&, const gdn_delta_rule_forward_args& args) {
  if (args.sequences > 0 && args.use_qk_l2norm != 0) {
    for (int64_t t = 0; t < args.cu_seqlens[args.sequences]; ++t) {
      for (int64_t h = 0; h < args.key_heads; ++h) {
        const int64_t row = t * args.key_heads + h;
        Normalise(args, args.q, t * args.q_token_stride + h * args.key_dim, args.q_hat, args.q_rstd,
                  row);
        Normalise(args, args.k, t * args.k_token_stride + h * args.key_dim, args.k_hat, args.k_rstd,
                  row);
      }
    }
  }
  for (int64_t n = 0; n < args.sequences; ++n) {
    for (int64_t hv = 0; hv < args.value_heads; ++hv) {
      for (int64_t v = 0; v < args.value_dim; ++v) StateRow(args, n, hv, v);
    }
  }
  return GDN_OK;
}

}  // namespace gdn::ref
