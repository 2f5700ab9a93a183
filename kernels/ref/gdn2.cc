#include "gdn/kernels/gdn2.h"

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

void LoadKey(const gdn2_args& args, const void* data, int64_t offset, double scale,
             KeyVector& out) {
  double sum = 0.0;
  for (int64_t i = 0; i < args.key_dim; ++i) {
    out[i] = Load(data, args.qkv_dtype, offset + i);
    sum += out[i] * out[i];
  }
  const double factor = args.use_qk_l2norm != 0 ? scale / std::sqrt(sum + 1e-6) : scale;
  for (int64_t i = 0; i < args.key_dim; ++i) out[i] *= factor;
}

// Row v of one head's state over the tokens [begin, end).
void StateRow(const gdn2_args& args, int64_t sequence, int64_t begin, int64_t end, int64_t hv,
              int64_t v) {
  const int64_t K = args.key_dim;
  const int64_t V = args.value_dim;
  const int64_t h = hv / (args.value_heads / args.key_heads);
  const int64_t gate_head = hv / (args.value_heads / args.gate_heads);
  const int64_t row = (hv * V + v) * K;
  const int64_t read = args.read_index[sequence] * args.state_slot_stride + row;
  const int64_t write = args.write_index[sequence] * args.state_slot_stride + row;
  const bool fresh = args.fresh != nullptr && args.fresh[sequence] != 0;
  const double scale = kernels::RuleScale(args.scale, K);
  KeyVector s{};
  for (int64_t i = 0; i < K && !fresh; ++i) s[i] = Load(args.state, args.state_dtype, read + i);
  KeyVector q;
  KeyVector k;
  for (int64_t t = begin; t < end; ++t) {
    LoadKey(args, args.q, t * args.q_token_stride + h * K, scale, q);
    LoadKey(args, args.k, t * args.k_token_stride + h * K, 1.0, k);
    const int64_t gate = (t * args.gate_heads + gate_head) * K;
    double erased = 0.0;
    for (int64_t i = 0; i < K; ++i) {
      s[i] *= std::exp(static_cast<double>(args.g[gate + i]));
      const double erase = Load(args.erase, args.gate_dtype, gate + i);
      erased += s[i] * erase * k[i];
    }
    const double value = Load(args.v, args.qkv_dtype, t * args.v_token_stride + hv * V + v);
    const double strength = Load(args.write, args.gate_dtype, (t * args.value_heads + hv) * V + v);
    const double u = strength * value - erased;
    double o = 0.0;
    for (int64_t i = 0; i < K; ++i) {
      s[i] += u * k[i];
      o += s[i] * q[i];
    }
    Store(args.o, args.o_dtype, t * args.o_token_stride + hv * V + v, static_cast<float>(o));
  }
  for (int64_t i = 0; i < K; ++i) {
    Store(args.state, args.state_dtype, write + i, static_cast<float>(s[i]));
  }
}

void Sequence(const gdn2_args& args, int64_t sequence, int64_t begin, int64_t end) {
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
    for (int64_t v = 0; v < args.value_dim; ++v) StateRow(args, sequence, begin, end, hv, v);
  }
}

}  // namespace

gdn_status Gdn2Step(const gdn_exec&, const gdn2_args& args) {
  for (int64_t i = 0; i < args.sequences; ++i) Sequence(args, i, i, i + 1);
  return GDN_OK;
}

gdn_status Gdn2Prefill(const gdn_exec&, const gdn2_args& args) {
  for (int64_t i = 0; i < args.sequences; ++i) {
    Sequence(args, i, args.cu_seqlens[i], args.cu_seqlens[i + 1]);
  }
  return GDN_OK;
}

}  // namespace gdn::ref
