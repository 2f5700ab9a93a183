#include "kernels/cuda/fused_prefill.h"

#include <algorithm>
#include <cstdint>

#include "gdn/kernels/causal_conv.h"
#include "gdn/kernels/delta_rule.h"
#include "gdn/kernels/gates.h"
#include "kernels/common/convert.h"

namespace gdn::cuda {
namespace {

constexpr char kOp[] = "fused_prefill";
constexpr int64_t kChunk = 64;
constexpr int64_t kAlignment = 256;

// Takes parts of a workspace one after the other; of NULL it only adds up their sizes.
class Parts {
 public:
  explicit Parts(void* workspace) : base_(static_cast<char*>(workspace)) {}
  void* Take(int64_t bytes) {
    char* const part = base_ == nullptr ? nullptr : base_ + size_;
    size_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return part;
  }
  size_t size() const { return static_cast<size_t>(size_); }

 private:
  char* base_;
  int64_t size_ = 0;
};

// What the separate ops leave to each other.
struct Scratch {
  void* qkv = nullptr;
  float* g = nullptr;
  float* beta = nullptr;
  void* o = nullptr;
};

gdn_dtype OutputType(const gdn_fused_decode_args& a) { return a.round_o != 0 ? a.dtype : GDN_F32; }

size_t Divide(const gdn_fused_prefill_args& args, void* workspace, PreparedChunks* chunks) {
  const gdn_fused_decode_args& a = args.layer;
  const int64_t slots = args.tokens / kChunk + a.rows;
  Parts parts(workspace);
  chunks->keys = parts.Take(slots * a.key_heads * int64_t{4 * kChunk * kChunk * 2});
  chunks->values = parts.Take(slots * a.value_heads * int64_t{2 * kChunk * kChunk * 2});
  // Two triangles without their quarter of zeros.
  chunks->mixes = parts.Take(slots * a.value_heads * int64_t{2 * kChunk * kChunk * 2 * 3 / 4});
  chunks->scalars = parts.Take(slots * a.value_heads * int64_t{3 * kChunk * 4 + 16});
  const int64_t items = slots * ChunkItems(a.key_heads, a.value_heads, {0, false});
  chunks->ready = static_cast<uint32_t*>(parts.Take((items + 1) * 4));
  return parts.size();
}

size_t Divide(const gdn_fused_prefill_args& args, void* workspace, Scratch* scratch) {
  const gdn_fused_decode_args& a = args.layer;
  const int64_t values = a.value_heads * a.value_dim;
  const int64_t channels = 2 * a.key_heads * a.key_dim + values;
  Parts parts(workspace);
  scratch->o = parts.Take(args.tokens * values * kernels::SizeOf(OutputType(a)));
  scratch->qkv = parts.Take(args.tokens * channels * kernels::SizeOf(a.dtype));
  scratch->g = static_cast<float*>(parts.Take(args.tokens * a.value_heads * 4));
  scratch->beta = static_cast<float*>(parts.Take(args.tokens * a.value_heads * 4));
  return parts.size();
}

gdn_delta_rule_args RuleArgs(const gdn_fused_prefill_args& args, const Scratch& scratch) {
  const gdn_fused_decode_args& a = args.layer;
  const int64_t keys = a.key_heads * a.key_dim;
  const int64_t values = a.value_heads * a.value_dim;
  const int64_t element = kernels::SizeOf(a.dtype);
  gdn_delta_rule_args rule{};
  rule.sequences = a.rows;
  rule.cu_seqlens = args.cu_seqlens;
  rule.key_heads = a.key_heads;
  rule.value_heads = a.value_heads;
  rule.key_dim = a.key_dim;
  rule.value_dim = a.value_dim;
  rule.q = scratch.qkv;
  rule.k = static_cast<char*>(scratch.qkv) + keys * element;
  rule.v = static_cast<char*>(scratch.qkv) + 2 * keys * element;
  rule.qkv_dtype = a.dtype;
  rule.q_token_stride = rule.k_token_stride = rule.v_token_stride = 2 * keys + values;
  rule.g = scratch.g;
  rule.beta = scratch.beta;
  rule.scale = a.scale;
  rule.use_qk_l2norm = a.use_qk_l2norm;
  rule.state = a.state;
  rule.state_dtype = a.state_dtype;
  rule.state_slot_stride = a.state_slot_stride;
  rule.read_index = a.read_index;
  rule.write_index = a.write_index;
  rule.fresh = a.fresh;
  rule.o = scratch.o;
  rule.o_dtype = OutputType(a);
  rule.o_token_stride = values;
  return rule;
}

// q|k|v are neighbouring columns of x.
gdn_status RunSeparateIn(const gdn_exec& exec, const gdn_fused_prefill_args& args,
                         const Scratch& scratch) {
  const gdn_fused_decode_args& a = args.layer;
  const int64_t element = kernels::SizeOf(a.dtype);
  const int64_t keys = a.key_heads * a.key_dim;
  const int64_t channels = 2 * keys + a.value_heads * a.value_dim;
  gdn_causal_conv_args conv{};
  conv.sequences = a.rows;
  conv.cu_seqlens = args.cu_seqlens;
  conv.channels = channels;
  conv.width = static_cast<int32_t>(a.conv_width);
  conv.silu = 1;
  conv.x = static_cast<const char*>(a.x) + a.q_offset * element;
  conv.x_dtype = conv.y_dtype = a.dtype;
  conv.x_token_stride = a.x_token_stride;
  conv.weight = a.conv_weight;
  conv.y = scratch.qkv;
  conv.y_token_stride = channels;
  conv.state = a.conv_state;
  conv.state_slot_stride = a.conv_slot_stride;
  conv.read_index = a.read_index;
  conv.write_index = a.write_index;
  conv.fresh = a.fresh;
  if (const gdn_status status = CausalConv(exec, conv); status != GDN_OK) return status;
  gdn_gates_args gates{};
  gates.tokens = args.tokens;
  gates.value_heads = a.value_heads;
  gates.a = static_cast<const char*>(a.x) + a.a_offset * element;
  gates.b = static_cast<const char*>(a.x) + a.b_offset * element;
  gates.dtype = a.dtype;
  gates.a_token_stride = gates.b_token_stride = a.x_token_stride;
  gates.a_log = a.a_log;
  gates.dt_bias = a.dt_bias;
  gates.beta_scale = a.beta_scale;
  gates.g = scratch.g;
  gates.beta = scratch.beta;
  return Gates(exec, gates);
}

}  // namespace

void FusedPrefillChunks(const gdn_fused_prefill_args& args, void* workspace,
                        PreparedChunks* chunks) {
  Divide(args, workspace, chunks);
}

size_t FusedPrefillWorkspace(const gdn_exec&, const gdn_fused_prefill_args& args) {
  // Room for either way: which is taken also depends on addresses, which a query does not read.
  PreparedChunks chunks;
  Scratch scratch;
  return std::max(Divide(args, nullptr, &chunks), Divide(args, nullptr, &scratch));
}

gdn_status FusedPrefill(const gdn_exec& exec, const gdn_fused_prefill_args& args) {
  const gdn_fused_decode_args& a = args.layer;
  if (a.rows == 0) return GDN_OK;
  Device device;
  if (const gdn_status status = CurrentDevice(kOp, &device); status != GDN_OK) return status;
  if (CoversFusedPrefill(device, args)) {
    PreparedChunks chunks;
    Divide(args, exec.workspace, &chunks);
    const PrefillPlan plan = PlanPrefill(device, args);
    if (const gdn_status status = LaunchWayIn(exec, args, chunks, plan); status != GDN_OK) {
      return status;
    }
    return LaunchWalk(exec, device, args, chunks, plan);
  }
  GDN_CHECK_ARG(a.k_offset == a.q_offset + a.key_heads * a.key_dim &&
                    a.v_offset == a.k_offset + a.key_heads * a.key_dim,
                GDN_UNSUPPORTED_SHAPE,
                "%s: for this shape q, k and v must be neighbouring columns of x", kOp);
  GDN_CHECK_ARG(
      args.checkpoint_every == 0, GDN_UNSUPPORTED_SHAPE,
      "%s: checkpoints need a call that the tuned kernels cover: K = V = 128, W = 4, 16-bit "
      "activations, use_qk_l2norm, columns and strides multiples of 8, an sm_90 device",
      kOp);
  Scratch scratch;
  Divide(args, exec.workspace, &scratch);
  gdn_status status = RunSeparateIn(exec, args, scratch);
  if (status != GDN_OK) return status;
  if (status = DeltaRulePrefill(exec, RuleArgs(args, scratch)); status != GDN_OK) return status;
  LaunchWayOut(args, scratch.o, Stream(exec));
  return CheckLaunch(kOp);
}

}  // namespace gdn::cuda
