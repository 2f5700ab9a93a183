// Calls of the training ops on device buffers, to be repeated, captured and counted.
#ifndef KERNELS_CUDA_TRAINING_OPS_TEST_UTIL_H_
#define KERNELS_CUDA_TRAINING_OPS_TEST_UTIL_H_

#include <functional>
#include <vector>

#include "gdn/kernels/causal_conv.h"
#include "gdn/kernels/causal_conv_backward.h"
#include "gdn/kernels/gates.h"
#include "gdn/kernels/gates_backward.h"
#include "gdn/kernels/l2_norm.h"
#include "gdn/kernels/l2_norm_backward.h"
#include "kernels/gated_rms_norm_training_test_util.h"

namespace gdn::kernels {

// A call on device buffers, and what it writes.
struct DeviceOp {
  enum class Kind { kValues, kE4m3, kScratch };
  struct Written {
    size_t buffer;
    gdn_dtype dtype;
    Kind kind;
    size_t begin;  // Bytes before it are an input.
  };
  std::vector<DeviceBuffer> buffers;
  std::vector<Written> outputs;
  std::function<gdn_status(const gdn_exec&)> call;

  size_t Add(const Tensor& tensor) {
    buffers.emplace_back(tensor);
    return buffers.size() - 1;
  }
  // All of whose elements from `first` on the call writes.
  size_t AddOutput(const Tensor& tensor, int64_t first = 0) {
    const size_t buffer = Add(tensor);
    outputs.push_back({buffer, tensor.dtype(), Kind::kValues,
                       static_cast<size_t>(first * SizeOf(tensor.dtype()))});
    return buffer;
  }
  size_t AddOutput(gdn_dtype dtype, int64_t size) { return AddOutput(Tensor(dtype, size)); }
  size_t AddE4m3(int64_t size) { return AddBytes(static_cast<size_t>(size), Kind::kE4m3); }
  // Of which the call may leave a part as it was.
  size_t AddScratch(size_t bytes) { return AddBytes(bytes, Kind::kScratch); }
  // Gives a call the workspace that `query` asks for.
  template <typename Query, typename Args>
  auto AddWorkspace(Query query, const Args& args) {
    gdn_exec cuda{};
    cuda.backend = GDN_BACKEND_CUDA;
    size_t bytes = 0;
    EXPECT_EQ(query(&cuda, &args, &bytes), GDN_OK);
    void* const scratch = buffers[AddScratch(bytes)].get();
    return [scratch, bytes](gdn_exec exec) {
      exec.workspace = scratch;
      exec.workspace_bytes = bytes;
      return exec;
    };
  }

  void Poison() {
    for (const Written& w : outputs) {
      Must(cudaMemset(buffers[w.buffer].get<char>() + w.begin, 0xff,
                      buffers[w.buffer].bytes() - w.begin));
    }
    Must(cudaDeviceSynchronize());
  }
  std::vector<std::vector<uint8_t>> Outputs() const {
    std::vector<std::vector<uint8_t>> all;
    for (const Written& w : outputs) {
      all.push_back(buffers[w.buffer].Bytes());
      all.back().erase(all.back().begin(), all.back().begin() + static_cast<int64_t>(w.begin));
    }
    return all;
  }
  // What is compared as bytes must be more than the poison, or NaNs that equal each other.
  void ExpectFinite(const std::vector<std::vector<uint8_t>>& all) const {
    for (size_t i = 0; i < outputs.size(); ++i) {
      const Written& w = outputs[i];
      if (w.kind == Kind::kScratch) continue;
      const bool e4m3 = w.kind == Kind::kE4m3;
      const size_t count = all[i].size() / (e4m3 ? 1 : static_cast<size_t>(SizeOf(w.dtype)));
      size_t wrong = 0, zeros = 0;
      for (size_t j = 0; j < count; ++j) {
        const bool finite =
            e4m3 ? (all[i][j] & 0x7f) != 0x7f
                 : std::isfinite(Load(all[i].data(), w.dtype, static_cast<int64_t>(j)));
        wrong += finite ? 0 : 1;
        zeros += e4m3 ? (all[i][j] & 0x7f) == 0
                      : Load(all[i].data(), w.dtype, static_cast<int64_t>(j)) == 0.0f;
      }
      EXPECT_EQ(wrong, 0u) << "of " << count << " elements of output " << i;
      EXPECT_TRUE(zeros < count || count == 0) << "output " << i << " holds zeros alone";
    }
  }

 private:
  size_t AddBytes(size_t bytes, Kind kind) {
    buffers.emplace_back(bytes);
    outputs.push_back({buffers.size() - 1, GDN_F32, kind, 0});
    return buffers.size() - 1;
  }
};

inline gdn_row_strides Dense(const Shape& s) {
  return {s.seq * s.heads * s.dim, s.heads * s.dim, s.dim, 1};
}

// Forward and backward of the gated norm, one after the other.
inline DeviceOp GatedNorm(const Shape& s, gdn_dtype dtype, gdn_fp8_scaling fp8) {
  DeviceOp op;
  const size_t x = op.Add(Normal(1, dtype, s.count()));
  const size_t gate = op.Add(Normal(2, dtype, s.count(), 2.0f));
  const size_t dy = op.Add(Normal(3, dtype, s.count()));
  const size_t gamma = op.Add(Normal(4, GDN_F32, s.dim));
  Tensor scale(GDN_F32, 1);
  scale.Set(0, 20.0f);
  const size_t fp8_scale = op.Add(scale);
  const size_t y = op.AddOutput(dtype, s.count());
  const bool quantise = fp8 != GDN_FP8_NONE;
  const size_t y8 = quantise ? op.AddE4m3(s.count()) : op.AddScratch(0);
  const size_t rstd = op.AddOutput(GDN_F32, s.rows());
  const size_t scale_inv = op.AddOutput(GDN_F32, fp8 == GDN_FP8_ROW ? s.rows() : quantise);
  const size_t amax = op.AddOutput(GDN_F32, 1);
  const size_t dx = op.AddOutput(dtype, s.count());
  const size_t dgate = op.AddOutput(dtype, s.count());
  const size_t dgamma = op.AddOutput(GDN_F32, s.dim);
  const auto at = [&op](size_t i) { return op.buffers[i].get(); };
  const auto floats = [&op](size_t i) { return op.buffers[i].get<float>(); };
  gdn_gated_rms_norm_forward_args forward{};
  forward.in = {s.batch,  s.seq, s.heads,  s.dim,     at(x),   dtype, Dense(s),
                at(gate), dtype, Dense(s), at(gamma), GDN_F32, 0,     GDN_GATE_SILU};
  forward.eps = 1e-6f;
  forward.y = at(y);
  forward.rstd = floats(rstd);
  forward.amax = floats(amax);
  gdn_gated_rms_norm_forward_args quantised = forward;
  quantised.fp8 = fp8;
  quantised.y = at(y8);
  quantised.fp8_scale = floats(fp8_scale);
  quantised.fp8_scale_inv = floats(scale_inv);
  gdn_gated_rms_norm_backward_args backward{};
  backward.in = forward.in;
  backward.rstd = forward.rstd;
  backward.dy = at(dy);
  backward.dy_strides = Dense(s);
  backward.dx = at(dx);
  backward.dgate = at(dgate);
  backward.dgamma = at(dgamma);
  const auto with_workspace = op.AddWorkspace(gdn_gated_rms_norm_backward_workspace, backward);
  op.call = [=](const gdn_exec& exec) {
    const gdn_exec with = with_workspace(exec);
    gdn_status status = gdn_gated_rms_norm_forward(&with, &forward);
    if (status == GDN_OK && quantise) {
      status = gdn_gated_rms_norm_forward(&with, &quantised);
    }
    return status == GDN_OK ? gdn_gated_rms_norm_backward(&with, &backward) : status;
  };
  return op;
}

inline DeviceOp L2Forward(int64_t rows, int64_t dim, gdn_dtype dtype) {
  DeviceOp op;
  const size_t x = op.Add(Normal(18, dtype, rows * dim));
  const size_t y = op.AddOutput(dtype, rows * dim);
  const size_t rstd = op.AddOutput(GDN_F32, rows);
  gdn_l2_norm_args args{};
  args.rows = rows;
  args.dim = args.x_row_stride = args.y_row_stride = dim;
  args.x = op.buffers[x].get();
  args.x_dtype = args.y_dtype = dtype;
  args.y = op.buffers[y].get();
  args.rstd = op.buffers[rstd].get<float>();
  args.eps = 1e-6f;
  args.scale = 0.5f;
  op.call = [args](const gdn_exec& exec) { return gdn_l2_norm(&exec, &args); };
  return op;
}

inline DeviceOp L2Backward(int64_t rows, int64_t dim, gdn_dtype dtype) {
  DeviceOp op;
  const size_t y = op.Add(Normal(5, dtype, rows * dim));
  const size_t dy = op.Add(Normal(6, dtype, rows * dim));
  const size_t rstd = op.Add(Normal(7, GDN_F32, rows));
  const size_t dx = op.AddOutput(dtype, rows * dim);
  const gdn_l2_norm_backward_args args = {rows,
                                          dim,
                                          op.buffers[y].get(),
                                          dtype,
                                          dim,
                                          op.buffers[rstd].get<float>(),
                                          op.buffers[dy].get(),
                                          dtype,
                                          dim,
                                          op.buffers[dx].get(),
                                          dtype,
                                          dim,
                                          1.0f};
  op.call = [args](const gdn_exec& exec) { return gdn_l2_norm_backward(&exec, &args); };
  return op;
}

inline DeviceOp Gates(int64_t tokens, int64_t heads, gdn_dtype dtype) {
  DeviceOp op;
  const int64_t count = tokens * heads;
  const size_t a = op.Add(Normal(26, dtype, count));
  const size_t b = op.Add(Normal(27, dtype, count));
  const size_t per_head = op.Add(Normal(28, GDN_F32, heads));
  const size_t g = op.AddOutput(GDN_F32, count);
  const size_t beta = op.AddOutput(GDN_F32, count);
  gdn_gates_args args{};
  args.tokens = tokens;
  args.value_heads = args.a_token_stride = args.b_token_stride = heads;
  args.a = op.buffers[a].get();
  args.b = op.buffers[b].get();
  args.dtype = dtype;
  args.a_log = args.dt_bias = op.buffers[per_head].get<float>();
  args.beta_scale = 2.0f;
  args.g = op.buffers[g].get<float>();
  args.beta = op.buffers[beta].get<float>();
  op.call = [args](const gdn_exec& exec) { return gdn_gates(&exec, &args); };
  return op;
}

inline DeviceOp GatesBackward(int64_t tokens, int64_t heads, gdn_dtype dtype) {
  DeviceOp op;
  const int64_t count = tokens * heads;
  const size_t a = op.Add(Normal(8, dtype, count));
  const size_t b = op.Add(Normal(9, dtype, count));
  const size_t per_head = op.Add(Normal(10, GDN_F32, heads));
  const size_t d = op.Add(Normal(11, GDN_F32, count));
  const size_t d_a = op.AddOutput(dtype, count);
  const size_t d_b = op.AddOutput(dtype, count);
  const size_t d_a_log = op.AddOutput(GDN_F32, heads);
  const size_t d_dt_bias = op.AddOutput(GDN_F32, heads);
  gdn_gates_backward_args args{};
  args.tokens = tokens;
  args.value_heads = heads;
  args.a = op.buffers[a].get();
  args.b = op.buffers[b].get();
  args.dtype = dtype;
  args.a_token_stride = args.b_token_stride = args.d_a_token_stride = args.d_b_token_stride = heads;
  args.a_log = args.dt_bias = op.buffers[per_head].get<float>();
  args.beta_scale = 1.0f;
  args.d_g = args.d_beta = op.buffers[d].get<float>();
  args.d_a = op.buffers[d_a].get();
  args.d_b = op.buffers[d_b].get();
  args.d_a_log = op.buffers[d_a_log].get<float>();
  args.d_dt_bias = op.buffers[d_dt_bias].get<float>();
  const auto with_workspace = op.AddWorkspace(gdn_gates_backward_workspace, args);
  op.call = [=](const gdn_exec& exec) {
    const gdn_exec with = with_workspace(exec);
    return gdn_gates_backward(&with, &args);
  };
  return op;
}

// The states are read from the first slots and written to those behind them.
inline DeviceOp Conv(const std::vector<int32_t>& cu, int64_t channels, gdn_dtype dtype) {
  DeviceOp op;
  const auto sequences = static_cast<int64_t>(cu.size()) - 1;
  const int64_t count = cu.back() * channels;
  const int64_t slot = 3 * channels;
  std::vector<int64_t> read, write;
  for (int64_t i = 0; i < sequences; ++i) {
    read.push_back(i);
    write.push_back(sequences + i);
  }
  op.buffers.emplace_back(cu);
  op.buffers.emplace_back(read);
  op.buffers.emplace_back(write);
  const size_t x = op.Add(Normal(29, dtype, count));
  const size_t weight = op.Add(Normal(30, GDN_F32, channels * 4));
  const size_t y = op.AddOutput(dtype, count);
  const size_t state = op.AddOutput(Normal(31, dtype, 2 * sequences * slot), sequences * slot);
  gdn_causal_conv_args args{};
  args.sequences = sequences;
  args.cu_seqlens = op.buffers[0].get<int32_t>();
  args.read_index = op.buffers[1].get<int64_t>();
  args.write_index = op.buffers[2].get<int64_t>();
  args.channels = args.x_token_stride = args.y_token_stride = channels;
  args.width = 4;
  args.silu = 1;
  args.x = op.buffers[x].get();
  args.x_dtype = args.y_dtype = dtype;
  args.weight = op.buffers[weight].get<float>();
  args.y = op.buffers[y].get();
  args.state = op.buffers[state].get();
  args.state_slot_stride = slot;
  op.call = [args](const gdn_exec& exec) { return gdn_causal_conv(&exec, &args); };
  return op;
}

inline DeviceOp ConvBackward(const std::vector<int32_t>& cu, int64_t channels, gdn_dtype dtype) {
  DeviceOp op;
  const auto sequences = static_cast<int64_t>(cu.size()) - 1;
  const int64_t count = cu.back() * channels;
  const int64_t states = sequences * 3 * channels;
  op.buffers.emplace_back(cu);
  const size_t x = op.Add(Normal(12, dtype, count));
  const size_t weight = op.Add(Normal(13, GDN_F32, channels * 4));
  const size_t bias = op.Add(Normal(14, GDN_F32, channels));
  const size_t state = op.Add(Normal(15, dtype, states));
  const size_t d_y = op.Add(Normal(16, dtype, count));
  const size_t d_final = op.Add(Normal(17, GDN_F32, states));
  const size_t d_x = op.AddOutput(dtype, count);
  const size_t d_weight = op.AddOutput(GDN_F32, channels * 4);
  const size_t d_bias = op.AddOutput(GDN_F32, channels);
  const size_t d_state = op.AddOutput(GDN_F32, states);
  gdn_causal_conv_backward_args args{};
  args.sequences = sequences;
  args.cu_seqlens = op.buffers[0].get<int32_t>();
  args.channels = channels;
  args.width = 4;
  args.silu = 1;
  args.x = op.buffers[x].get();
  args.x_dtype = args.d_y_dtype = args.d_x_dtype = dtype;
  args.x_token_stride = args.d_y_token_stride = args.d_x_token_stride = channels;
  args.weight = op.buffers[weight].get<float>();
  args.bias = op.buffers[bias].get<float>();
  args.initial_state = op.buffers[state].get();
  args.d_y = op.buffers[d_y].get();
  args.d_final_state = op.buffers[d_final].get<float>();
  args.d_x = op.buffers[d_x].get();
  args.d_weight = op.buffers[d_weight].get<float>();
  args.d_bias = op.buffers[d_bias].get<float>();
  args.d_initial_state = op.buffers[d_state].get<float>();
  const auto with_workspace = op.AddWorkspace(gdn_causal_conv_backward_workspace, args);
  op.call = [=](const gdn_exec& exec) {
    const gdn_exec with = with_workspace(exec);
    return gdn_causal_conv_backward(&with, &args);
  };
  return op;
}

// Every kernel of the norms, gates and convolutions that a shape or a type can choose.
inline std::vector<DeviceOp> Ops() {
  std::vector<DeviceOp> ops;
  ops.push_back(GatedNorm({2, 301, 3, 128}, GDN_BF16, GDN_FP8_ROW));
  ops.push_back(GatedNorm({2, 151, 3, 64}, GDN_BF16, GDN_FP8_STATIC));
  ops.push_back(GatedNorm({2, 151, 3, 256}, GDN_F16, GDN_FP8_NONE));
  ops.push_back(GatedNorm({1, 37, 3, 100}, GDN_F32, GDN_FP8_NONE));
  ops.push_back(GatedNorm({1, 50, 2, 1024}, GDN_F16, GDN_FP8_NONE));
  ops.push_back(L2Forward(1001, 128, GDN_BF16));
  ops.push_back(L2Forward(1001, 64, GDN_F16));
  ops.push_back(L2Forward(101, 60, GDN_F32));
  ops.push_back(L2Backward(1001, 128, GDN_BF16));
  ops.push_back(L2Backward(101, 60, GDN_F32));
  ops.push_back(Gates(1000, 32, GDN_BF16));
  ops.push_back(GatesBackward(1000, 32, GDN_BF16));
  ops.push_back(Conv({0, 5, 5, 300, 1000}, 256, GDN_BF16));
  ops.push_back(Conv({0, 200, 201}, 33, GDN_F32));
  ops.push_back(ConvBackward({0, 5, 5, 300, 1000}, 256, GDN_BF16));
  ops.push_back(ConvBackward({0, 200, 201}, 33, GDN_F32));
  return ops;
}

}  // namespace gdn::kernels

#endif  // KERNELS_CUDA_TRAINING_OPS_TEST_UTIL_H_
