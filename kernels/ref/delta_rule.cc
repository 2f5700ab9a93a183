#include "gdn/kernels/delta_rule.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/common/convert.h"
#include "kernels/common/rule_args.h"

namespace gdn::ref {

using kernels::Load;
using kernels::Store;

namespace {

constexpr int64_t kMaxKeyDim = 256;
constexpr int64_t kRows = 16;  // State rows held at once, so that q and k are prepared less often.

using KeyVector = std::array<double, kMaxKeyDim>;

// One head of q or k in FP64, normalised on request, then scaled.
void LoadKey(const gdn_delta_rule_args& args, const void* data, int64_t offset, double scale,
             KeyVector& out) {
  double sum = 0.0;
  for (int64_t i = 0; i < args.key_dim; ++i) {
    out[i] = Load(data, args.qkv_dtype, offset + i);
    sum += out[i] * out[i];
  }
  const double factor = args.use_qk_l2norm != 0 ? scale / std::sqrt(sum + 1e-6) : scale;
  for (int64_t i = 0; i < args.key_dim; ++i) out[i] *= factor;
}

// Rows [v0, v1) of one head's state over the tokens [begin, end).
void HeadRows(const gdn_delta_rule_args& args, int64_t sequence, int64_t begin, int64_t end,
              int64_t hv, int64_t v0, int64_t v1) {
  const int64_t K = args.key_dim;
  const int64_t V = args.value_dim;
  const int64_t h = hv / (args.value_heads / args.key_heads);
  const int64_t read = args.read_index[sequence] * args.state_slot_stride + hv * V * K;
  const int64_t write = args.write_index[sequence] * args.state_slot_stride + hv * V * K;
  const bool fresh = args.fresh != nullptr && args.fresh[sequence] != 0;
  const double scale = kernels::RuleScale(args.scale, K);
  std::array<KeyVector, kRows> state{};
  for (int64_t v = v0; v < v1 && !fresh; ++v) {
    for (int64_t i = 0; i < K; ++i) {
      state[v - v0][i] = Load(args.state, args.state_dtype, read + v * K + i);
    }
  }
  KeyVector q;
  KeyVector k;
  for (int64_t t = begin; t < end; ++t) {
    LoadKey(args, args.q, t * args.q_token_stride + h * K, scale, q);
    LoadKey(args, args.k, t * args.k_token_stride + h * K, 1.0, k);
    const double decay = std::exp(static_cast<double>(args.g[t * args.value_heads + hv]));
    const double beta = args.beta[t * args.value_heads + hv];
    for (int64_t v = v0; v < v1; ++v) {
      KeyVector& s = state[v - v0];
      double predicted = 0.0;
      for (int64_t i = 0; i < K; ++i) {
        s[i] *= decay;
        predicted += s[i] * k[i];
      }
      const double value = Load(args.v, args.qkv_dtype, t * args.v_token_stride + hv * V + v);
      const double u = beta * (value - predicted);
      double o = 0.0;
      for (int64_t i = 0; i < K; ++i) {
        s[i] += u * k[i];
        o += s[i] * q[i];
      }
      Store(args.o, args.o_dtype, t * args.o_token_stride + hv * V + v, static_cast<float>(o));
    }
  }
  for (int64_t v = v0; v < v1; ++v) {
    for (int64_t i = 0; i < K; ++i) {
      Store(args.state, args.state_dtype, write + v * K + i, static_cast<float>(state[v - v0][i]));
    }
  }
}

void Sequence(const gdn_delta_rule_args& args, int64_t sequence, int64_t begin, int64_t end) {
  if (args.read_index[sequence] < 0 || args.write_index[sequence] < 0) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t i = 0; i < args.value_heads * args.value_dim; ++i) {
        Store(args.o, args.o_dtype, t * args.o_token_stride + i, 0.0f);
      }
    }
    return;
  }
  if (begin == end && args.read_index[sequence] == args.write_index[sequence]) return;
  for (int64_t hv = 0; hv < args.value_heads; ++hv) {
    for (int64_t v = 0; v < args.value_dim; v += kRows) {
      HeadRows(args, sequence, begin, end, hv, v, std::min(v + kRows, args.value_dim));
    }
  }
}

}  // namespace

gdn_status DeltaRuleStep(const gdn_exec&, const gdn_delta_rule_args& args) {
  for (int64_t i = 0; i < args.sequences; ++i) Sequence(args, i, i, i + 1);
  return GDN_OK;
}

gdn_status DeltaRulePrefill(const gdn_exec&, const gdn_delta_rule_args& args) {
  for (int64_t i = 0; i < args.sequences; ++i) {
    Sequence(args, i, args.cu_seqlens[i], args.cu_seqlens[i + 1]);
  }
  return GDN_OK;
}

}  // namespace gdn::ref
