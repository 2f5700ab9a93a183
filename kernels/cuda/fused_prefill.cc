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

struct Scratch {
  PreparedChunks chunks;  // Either the chunks,
  void* qkv = nullptr;    // or what the separate ops leave.
  float* g = nullptr;
  float* beta = nullptr;
  void* o = nullptr;
  size_t bytes = 0;
};

gdn_dtype OutputType(const gdn_fused_decode_args& a) { return a.round_o != 0 ? a.dtype : GDN_F32; }

Scratch Divide(const gdn_fused_prefill_args& args, void* workspace) {
  const gdn_fused_decode_args& a = args.layer;
  const int64_t keys = a.key_heads * a.key_dim;
  const int64_t values = a.value_heads * a.value_dim;
  const int64_t slots = args.tokens / kChunk + a.rows;
  // Room for either way: which is taken also depends on addresses, which a query does not read.
  Scratch scratch;
  Parts parts(workspace);
  scratch.o = parts.Take(args.tokens * values * kernels::SizeOf(OutputType(a)));
  Parts chunks(workspace == nullptr ? nullptr : static_cast<char*>(workspace) + parts.size());
  scratch.chunks.keys = chunks.Take(slots * kChunk * 2 * keys * 2);
  scratch.chunks.values = chunks.Take(slots * kChunk * values * 2);
  scratch.chunks.scalars = chunks.Take(slots * a.value_heads * int64_t{5 * kChunk * 4});
  Parts separate(workspace == nullptr ? nullptr : static_cast<char*>(workspace) + parts.size());
  scratch.qkv = separate.Take(args.tokens * (2 * keys + values) * kernels::SizeOf(a.dtype));
  scratch.g = static_cast<float*>(separate.Take(args.tokens * a.value_heads * 4));
  scratch.beta = static_cast<float*>(separate.Take(args.tokens * a.value_heads * 4));
  scratch.bytes = parts.size() + std::max(chunks.size(), separate.size());
  return scratch;
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

// Whether columns and rows of 16-bit elements can be accessed in fours.
bool IsQuadAligned(const void* data, int64_t stride, int64_t offset = 0) {
  return reinterpret_cast<uintptr_t>(data) % 8 == 0 && stride % 4 == 0 && offset % 4 == 0;
}

bool CoversWayIn(const gdn_fused_decode_args& a) {
  return a.conv_width == 4 && a.use_qk_l2norm != 0 &&
         IsQuadAligned(a.x, a.x_token_stride, a.q_offset) &&
         IsQuadAligned(a.x, a.x_token_stride, a.k_offset) &&
         IsQuadAligned(a.x, a.x_token_stride, a.v_offset) &&
         IsQuadAligned(a.conv_state, a.conv_slot_stride) &&
         reinterpret_cast<uintptr_t>(a.conv_weight) % 16 == 0;
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
  *chunks = Divide(args, workspace).chunks;
}

size_t FusedPrefillWorkspace(const gdn_exec&, const gdn_fused_prefill_args& args) {
  return Divide(args, nullptr).bytes;
}

gdn_status FusedPrefill(const gdn_exec& exec, const gdn_fused_prefill_args& args) {
  const gdn_fused_decode_args& a = args.layer;
  if (a.rows == 0) return GDN_OK;
  Device device;
  if (const gdn_status status = CurrentDevice(kOp, &device); status != GDN_OK) return status;
  const Scratch scratch = Divide(args, exec.workspace);
  const gdn_delta_rule_args rule = RuleArgs(args, scratch);
  gdn_status status = GDN_OK;
  if (CoversWayIn(a) && CoversChunked(device, rule)) {
    LaunchWayIn(args, scratch.chunks, Stream(exec));
    if (status = CheckLaunch(kOp); status != GDN_OK) return status;
    status = LaunchChunked(exec, device, rule, scratch.chunks);
  } else {
    GDN_CHECK_ARG(a.k_offset == a.q_offset + a.key_heads * a.key_dim &&
                      a.v_offset == a.k_offset + a.key_heads * a.key_dim,
                  GDN_UNSUPPORTED_SHAPE,
                  "%s: for this shape q, k and v must be neighbouring columns of x", kOp);
    if (status = RunSeparateIn(exec, args, scratch); status != GDN_OK) return status;
    status = DeltaRulePrefill(exec, rule);
  }
  if (status != GDN_OK) return status;
  LaunchWayOut(args, scratch.o, Stream(exec));
  return CheckLaunch(kOp);
}

}  // namespace gdn::cuda
