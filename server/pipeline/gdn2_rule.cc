#include "server/pipeline/gdn2_rule.h"

#include "gdn/kernels/gdn2_gates.h"
#include "server/pipeline/gdn2_args.h"

namespace gdn::pipeline {

void Gdn2Rule::Reserve(int64_t tokens) {
  g_.Reserve(tokens * spec_.gdn.key_size());
  erase_.Reserve(tokens * spec_.gdn.key_size());
  write_.Reserve(tokens * spec_.gdn.value_size());
}

absl::Status Gdn2Rule::Gates(const PackedLayer& weights, int64_t tokens, const float* projection) {
  gdn2_gates_args args = Gdn2GatesArgs(spec_, projection, GDN_F32, projection_stride_);
  args.tokens = tokens;
  args.a_log = weights.a_log.data();
  args.dt_bias = weights.dt_bias.data();
  args.g = g_.data();
  args.erase = erase_.data();
  args.write = write_.data();
  args.gate_dtype = GDN_F32;
  return ops_->Run("gdn2_gates", gdn_gdn2_gates, args);
}

absl::Status Gdn2Rule::Run(int64_t layer, const SequenceGroup& group, bool step,
                           int64_t first_token, float* conv_out, float* mixed) {
  const model::GdnDims& dims = spec_.gdn;
  float* columns = conv_out + first_token * conv_stride_;
  const int64_t tokens = step ? group.size() : group.cu_seqlens.back();
  GDN_RETURN_IF_ERROR(ops_->Run("qk_norm", Gdn2QkNorm,
                                Gdn2QkNormArgs(spec_, tokens, columns, GDN_F32, conv_stride_)));

  gdn2_args args = Gdn2Args(spec_, columns, GDN_F32, conv_stride_);
  args.tokens = tokens;
  args.sequences = group.size();
  args.cu_seqlens = group.cu_seqlens.data();
  args.g = g_.data() + first_token * dims.key_size();
  args.erase = erase_.data() + first_token * dims.key_size();
  args.write = write_.data() + first_token * dims.value_size();
  args.gate_dtype = GDN_F32;
  args.state = states_->recurrent(layer);
  args.state_dtype = states_->recurrent_type();
  args.state_slot_stride = states_->recurrent_slot_elements();
  args.read_index = group.read_slot.data();
  args.write_index = group.write_slot.data();
  args.fresh = group.fresh.data();
  args.o = mixed + first_token * mixed_stride_;
  args.o_dtype = GDN_F32;
  args.o_token_stride = mixed_stride_;
  if (!step) {
    return ops_->Run("gdn2_prefill", gdn_gdn2_prefill, args, gdn_gdn2_prefill_workspace);
  }
  if (ops_->timer() != nullptr) {
    ops_->timer()->OnDecodeStateBytes(2 * group.size() * states_->recurrent_slot_bytes());
  }
  return ops_->Run("gdn2_step", gdn_gdn2_step, args);
}

}  // namespace gdn::pipeline
