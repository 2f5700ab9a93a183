// The training ops on a GPU: the same bits whatever runs beside them, from a graph, in any company
// of rows, and beyond 2^31 elements; and how many kernels a call launches.
#include <algorithm>
#include <functional>
#include <tuple>

#include "gdn/kernels/causal_conv_backward.h"
#include "gdn/kernels/gates_backward.h"
#include "gdn/kernels/l2_norm.h"
#include "gdn/kernels/l2_norm_backward.h"
#include "kernels/gated_rms_norm_training_test_util.h"

namespace gdn::kernels {
namespace {

using TrainingBitsCuda = CudaTest;

// A call on device buffers, and those that it writes.
struct DeviceOp {
  std::vector<DeviceBuffer> buffers;
  std::vector<size_t> outputs;  // of buffers
  std::function<gdn_status(const gdn_exec&)> call;

  size_t Add(const Tensor& tensor) {
    buffers.emplace_back(tensor);
    return buffers.size() - 1;
  }
  size_t AddOutput(gdn_dtype dtype, int64_t size) {
    outputs.push_back(Add(Tensor(dtype, size)));
    return outputs.back();
  }
  void Poison() {
    for (const size_t i : outputs) Must(cudaMemset(buffers[i].get(), 0xff, buffers[i].bytes()));
    Must(cudaDeviceSynchronize());
  }
  std::vector<std::vector<uint8_t>> Outputs() const {
    std::vector<std::vector<uint8_t>> all;
    for (const size_t i : outputs) all.push_back(buffers[i].Bytes());
    return all;
  }
};

Tensor Normal(uint32_t seed, gdn_dtype dtype, int64_t size, float scale = 1.0f) {
  Random random(seed);
  Tensor tensor(dtype, size);
  FillNormal(random, tensor, scale);
  return tensor;
}

gdn_row_strides Dense(const Shape& s) {
  return {s.seq * s.heads * s.dim, s.heads * s.dim, s.dim, 1};
}

// Forward and backward of the gated norm, one after the other.
DeviceOp GatedNorm(const Shape& s, gdn_dtype dtype, gdn_fp8_scaling fp8) {
  DeviceOp op;
  const size_t x = op.Add(Normal(1, dtype, s.count()));
  const size_t gate = op.Add(Normal(2, dtype, s.count(), 2.0f));
  const size_t dy = op.Add(Normal(3, dtype, s.count()));
  const size_t gamma = op.Add(Normal(4, GDN_F32, s.dim));
  const size_t y = op.AddOutput(dtype, s.count());
  const size_t y8 = op.AddOutput(GDN_F32, (s.count() + 3) / 4);
  const size_t rstd = op.AddOutput(GDN_F32, s.rows());
  const size_t scale_inv = op.AddOutput(GDN_F32, s.rows());
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
  quantised.fp8_scale_inv = floats(scale_inv);
  gdn_gated_rms_norm_backward_args backward{};
  backward.in = forward.in;
  backward.rstd = forward.rstd;
  backward.dy = at(dy);
  backward.dy_strides = Dense(s);
  backward.dx = at(dx);
  backward.dgate = at(dgate);
  backward.dgamma = at(dgamma);
  gdn_exec query{};
  query.backend = GDN_BACKEND_CUDA;
  size_t bytes = 0;
  EXPECT_EQ(gdn_gated_rms_norm_backward_workspace(&query, &backward, &bytes), GDN_OK);
  const size_t workspace = op.AddOutput(GDN_F32, static_cast<int64_t>(bytes) / 4);
  void* const scratch = at(workspace);
  op.call = [=](const gdn_exec& exec) {
    gdn_exec with = exec;
    with.workspace = scratch;
    with.workspace_bytes = bytes;
    gdn_status status = gdn_gated_rms_norm_forward(&with, &forward);
    if (status == GDN_OK && fp8 != GDN_FP8_NONE) {
      status = gdn_gated_rms_norm_forward(&with, &quantised);
    }
    return status == GDN_OK ? gdn_gated_rms_norm_backward(&with, &backward) : status;
  };
  return op;
}

DeviceOp L2Backward(int64_t rows, int64_t dim, gdn_dtype dtype) {
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

DeviceOp GatesBackward(int64_t tokens, int64_t heads, gdn_dtype dtype) {
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
  gdn_exec query{};
  query.backend = GDN_BACKEND_CUDA;
  size_t bytes = 0;
  EXPECT_EQ(gdn_gates_backward_workspace(&query, &args, &bytes), GDN_OK);
  const size_t workspace = op.AddOutput(GDN_F32, static_cast<int64_t>(bytes) / 4);
  void* const scratch = op.buffers[workspace].get();
  op.call = [=](const gdn_exec& exec) {
    gdn_exec with = exec;
    with.workspace = scratch;
    with.workspace_bytes = bytes;
    return gdn_gates_backward(&with, &args);
  };
  return op;
}

DeviceOp ConvBackward(const std::vector<int32_t>& cu, int64_t channels, gdn_dtype dtype) {
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
  gdn_exec query{};
  query.backend = GDN_BACKEND_CUDA;
  size_t bytes = 0;
  EXPECT_EQ(gdn_causal_conv_backward_workspace(&query, &args, &bytes), GDN_OK);
  const size_t workspace = op.AddOutput(GDN_F32, static_cast<int64_t>(bytes) / 4);
  void* const scratch = op.buffers[workspace].get();
  op.call = [=](const gdn_exec& exec) {
    gdn_exec with = exec;
    with.workspace = scratch;
    with.workspace_bytes = bytes;
    return gdn_causal_conv_backward(&with, &args);
  };
  return op;
}

std::vector<DeviceOp> Ops() {
  std::vector<DeviceOp> ops;
  ops.push_back(GatedNorm({2, 301, 3, 128}, GDN_BF16, GDN_FP8_ROW));
  ops.push_back(GatedNorm({1, 37, 3, 100}, GDN_F32, GDN_FP8_NONE));
  ops.push_back(GatedNorm({1, 50, 2, 1024}, GDN_F16, GDN_FP8_NONE));
  ops.push_back(L2Backward(1001, 128, GDN_BF16));
  ops.push_back(L2Backward(101, 60, GDN_F32));
  ops.push_back(GatesBackward(1000, 32, GDN_BF16));
  ops.push_back(ConvBackward({0, 5, 5, 300, 1000}, 256, GDN_BF16));
  ops.push_back(ConvBackward({0, 200, 201}, 33, GDN_F32));
  return ops;
}

// B20, B22, T20: while another stream keeps the device and its memory busy.
TEST_F(TrainingBitsCuda, T20AThousandRepeatsUnderContentionKeepEveryBit) {
  constexpr int kRepeats = 1000;
  constexpr int kRounds = 20;
  const DeviceOp busy = GatedNorm({4, 512, 16, 128}, GDN_BF16, GDN_FP8_ROW);
  const Stream side;
  const Stream stream;
  for (DeviceOp& op : Ops()) {
    op.Poison();
    ASSERT_EQ(op.call(stream.Exec()), GDN_OK) << gdn_last_error();
    stream.Synchronize();
    const auto expected = op.Outputs();
    for (int round = 0; round < kRounds; ++round) {
      op.Poison();
      for (int i = 0; i < kRepeats / kRounds; ++i) {
        ASSERT_EQ(busy.call(side.Exec()), GDN_OK);
        ASSERT_EQ(op.call(stream.Exec()), GDN_OK);
      }
      stream.Synchronize();
      ASSERT_TRUE(op.Outputs() == expected) << "round " << round;
    }
    side.Synchronize();
  }
}

struct Captured {
  Captured(const Stream& stream, const DeviceOp& op) {
    Must(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal));
    EXPECT_EQ(op.call(stream.Exec()), GDN_OK) << gdn_last_error();
    Must(cudaStreamEndCapture(stream.get(), &graph));
    for (const cudaGraphNode_t node : NodesOf(graph)) {
      cudaGraphNodeType type;
      Must(cudaGraphNodeGetType(node, &type));
      (type == cudaGraphNodeTypeKernel ? kernels : others) += 1;
    }
  }
  ~Captured() { cudaGraphDestroy(graph); }
  cudaGraph_t graph = nullptr;
  int kernels = 0;
  int others = 0;
};

// B28, T24: capturable, and the replay gives the bits of the eager call.
TEST_F(TrainingBitsCuda, B28GraphReplayGivesTheBitsOfTheEagerCall) {
  const Stream stream;
  for (DeviceOp& op : Ops()) {
    op.Poison();
    ASSERT_EQ(op.call(stream.Exec()), GDN_OK) << gdn_last_error();
    stream.Synchronize();
    const auto expected = op.Outputs();
    const Captured captured(stream, op);
    EXPECT_EQ(captured.others, 0);
    cudaGraphExec_t executable = nullptr;
    Must(cudaGraphInstantiate(&executable, captured.graph, 0));
    for (int replay = 0; replay < 3; ++replay) {
      op.Poison();
      Must(cudaGraphLaunch(executable, stream.get()));
      stream.Synchronize();
      EXPECT_TRUE(op.Outputs() == expected);
    }
    Must(cudaGraphExecDestroy(executable));
  }
}

// The fused kernels are what runs: one for the forward, two for a backward, and one before a
// forward that is asked for amax.
TEST_F(TrainingBitsCuda, LaunchCounts) {
  const Stream stream;
  EXPECT_EQ(Captured(stream, GatedNorm({1, 40, 3, 128}, GDN_BF16, GDN_FP8_NONE)).kernels, 2 + 2);
  EXPECT_EQ(Captured(stream, GatedNorm({1, 40, 3, 128}, GDN_BF16, GDN_FP8_ROW)).kernels, 4 + 2);
  EXPECT_EQ(Captured(stream, L2Backward(10, 128, GDN_BF16)).kernels, 1);
  EXPECT_EQ(Captured(stream, GatesBackward(10, 4, GDN_BF16)).kernels, 2);
  EXPECT_EQ(Captured(stream, ConvBackward({0, 7}, 8, GDN_BF16)).kernels, 3);
}

// X9: a row alone has the bits it has among others.
TEST_F(TrainingBitsCuda, X9RowsDoNotDependOnTheirCompany) {
  for (const int64_t dim : {64, 96, 128, 256, 1024}) {
    Problem many;
    many.shape = {1, 333, 1, dim};
    Random random(20);
    many.Fill(random);
    const Results all = RunBoth(Tested(), many);
    for (const int64_t row : {0, 17, 332}) {
      Problem alone = many;
      alone.shape.seq = 1;
      for (const auto& [from, to] :
           {std::pair{&many.x, &alone.x}, std::pair{&many.gate, &alone.gate},
            std::pair{&many.dy, &alone.dy}}) {
        *to = View(GDN_BF16, alone.shape, Layout::kDense);
        for (int64_t i = 0; i < dim; ++i) to->storage.Set(i, from->storage.Get(row * dim + i));
      }
      const Results one = RunBoth(Tested(), alone);
      for (int64_t i = 0; i < dim; ++i) {
        ASSERT_EQ(one.y.Get(i), all.y.Get(row * dim + i));
        ASSERT_EQ(one.dx.Get(i), all.dx.Get(row * dim + i));
        ASSERT_EQ(one.dgate.Get(i), all.dgate.Get(row * dim + i));
      }
      EXPECT_EQ(one.rstd.Get(0), all.rstd.Get(row));
    }
  }
}

// Q3: many rows have a kernel of their own for FP8. The same rows over and over give what they give
// once.
TEST_F(TrainingBitsCuda, Q3ManyRowsHaveTheBitsOfFew) {
  constexpr int64_t kRows = 1001;
  constexpr int64_t kTimes = 70;
  constexpr int64_t kDim = 128;
  const Tensor x = Normal(23, GDN_BF16, kRows * kDim);
  const Tensor gate = Normal(24, GDN_BF16, kRows * kDim, 2.0f);
  const Tensor gamma = Normal(25, GDN_F32, kDim);
  const auto run = [&](int64_t times, gdn_fp8_scaling fp8) {
    std::vector<uint8_t> many[2];
    for (int64_t i = 0; i < times; ++i) {
      many[0].insert(many[0].end(), x.bytes().begin(), x.bytes().end());
      many[1].insert(many[1].end(), gate.bytes().begin(), gate.bytes().end());
    }
    std::vector<uint8_t> y(static_cast<size_t>(times * kRows * kDim), 0xab);
    std::vector<float> scale = {20.0f}, scale_inv(static_cast<size_t>(times * kRows), -1.0f);
    std::vector<float> amax = {-1.0f};
    gdn_gated_rms_norm_forward_args args{};
    const gdn_row_strides dense = {0, kDim, 0, 1};
    args.in = {1,     times * kRows,  1,        kDim,  many[0].data(), GDN_BF16,
               dense, many[1].data(), GDN_BF16, dense, gamma.data(),   GDN_F32,
               0,     GDN_GATE_SILU};
    args.eps = 1e-6f;
    args.y = y.data();
    args.fp8 = fp8;
    args.fp8_scale = scale.data();
    args.fp8_scale_inv = scale_inv.data();
    args.amax = amax.data();
    EXPECT_EQ(
        CallOp(Execution(Tested()), gdn_gated_rms_norm_forward, args,
               {In(many[0]), In(many[1]), In(gamma), In(scale), Out(y), Out(scale_inv), Out(amax)},
               {args.in.x, args.in.gate, args.in.gamma, args.fp8_scale, args.y, args.fp8_scale_inv,
                args.amax}),
        GDN_OK)
        << gdn_last_error();
    if (fp8 == GDN_FP8_STATIC) scale_inv.resize(1);
    return std::tuple{y, scale_inv, amax};
  };
  for (const gdn_fp8_scaling fp8 : {GDN_FP8_ROW, GDN_FP8_STATIC}) {
    const auto [y, scale_inv, amax] = run(1, fp8);
    const auto [many_y, many_scale_inv, many_amax] = run(kTimes, fp8);
    for (int64_t i = 0; i < kTimes; ++i) {
      ASSERT_TRUE(std::equal(y.begin(), y.end(), many_y.begin() + i * kRows * kDim)) << i;
      if (fp8 == GDN_FP8_STATIC) continue;
      ASSERT_TRUE(
          std::equal(scale_inv.begin(), scale_inv.end(), many_scale_inv.begin() + i * kRows));
    }
    EXPECT_EQ(many_scale_inv.back(), scale_inv.back());
    EXPECT_EQ(many_amax, amax);
  }
}

// A2, A18: rows on 16 bytes have a kernel of their own; it must not move a bit of y or rstd.
TEST_F(TrainingBitsCuda, A18L2NormHasTheSameBitsWhateverTheAlignment) {
  for (const gdn_dtype dtype : {GDN_BF16, GDN_F16}) {
    for (const int64_t dim : {64, 128}) {
      constexpr int64_t kRows = 1003;
      const Tensor dense = Normal(22, dtype, kRows * dim);
      std::vector<Tensor> y, rstd;
      for (const int64_t pad : {8, 3}) {
        const int64_t stride = dim + pad;
        Tensor x(dtype, kRows * stride);
        for (int64_t i = 0; i < dense.size(); ++i) {
          x.Set(i / dim * stride + i % dim, dense.Get(i));
        }
        Tensor strided(dtype, kRows * stride);
        rstd.emplace_back(GDN_F32, kRows);
        gdn_l2_norm_args args = {kRows, dim,    x.data(),
                                 dtype, stride, strided.data(),
                                 dtype, stride, static_cast<float*>(rstd.back().data()),
                                 1e-6f, 0.5f};
        ASSERT_EQ(CallOp(Execution(Tested()), gdn_l2_norm, args,
                         {In(x), Out(strided), Out(rstd.back())}, {args.x, args.y, args.rstd}),
                  GDN_OK)
            << gdn_last_error();
        y.emplace_back(dtype, kRows * dim);
        for (int64_t i = 0; i < dense.size(); ++i) {
          y.back().Set(i, strided.Get(i / dim * stride + i % dim));
        }
        for (int64_t row = 0; row < kRows; ++row) {
          for (int64_t i = dim; i < stride; ++i) {
            ASSERT_TRUE(IsPoison(strided, row * stride + i));
          }
        }
      }
      EXPECT_EQ(y[0].bytes(), y[1].bytes()) << dtype << " dim " << dim;
      EXPECT_EQ(rstd[0].bytes(), rstd[1].bytes());
    }
  }
}

// X6: the last rows of more than 2^31 elements, beside a small call on the same rows.
TEST_F(TrainingBitsCuda, X6OffsetsAreSixtyFourBits) {
  constexpr int64_t kDim = 128;
  constexpr int64_t kRows = (int64_t{1} << 24) + 5;
  constexpr int64_t kTail = 7;
  Problem small;
  small.shape = {1, kTail, 1, kDim};
  Random random(21);
  small.Fill(random);
  const Results expected = RunBoth(Tested(), small);
  size_t free_bytes = 0, total_bytes = 0;
  Must(cudaMemGetInfo(&free_bytes, &total_bytes));
  const auto bytes = static_cast<size_t>(kRows * kDim * 2);
  if (free_bytes < 7 * bytes) GTEST_SKIP() << "needs " << 7 * bytes << " bytes of device memory";
  std::vector<DeviceBuffer> buffers;  // x, gate, dy, y, dx, dgate
  for (int i = 0; i < 6; ++i) {
    buffers.emplace_back(bytes);
    Must(cudaMemset(buffers.back().get(), 0x3c, bytes));
  }
  constexpr int64_t kFirst = (kRows - kTail) * kDim;
  const View* const views[] = {&small.x, &small.gate, &small.dy};
  for (size_t i = 0; i < 3; ++i) {
    Must(cudaMemcpy(buffers[i].get<uint16_t>() + kFirst, views[i]->storage.data(), kTail * kDim * 2,
                    cudaMemcpyHostToDevice));
  }
  const DeviceBuffer gamma(small.gamma);
  const DeviceBuffer rstd(static_cast<size_t>(kRows) * sizeof(float));
  const DeviceBuffer dgamma(kDim * sizeof(float));
  const Stream stream;
  gdn_exec exec = stream.Exec();
  for (const bool strided : {false, true}) {
    gdn_gated_rms_norm_forward_args forward{};
    forward.in = small.Input();
    // Two axes divide where one would be dense.
    forward.in.seq = strided ? 5 : kRows;
    forward.in.batch = kRows / forward.in.seq;
    ASSERT_EQ(forward.in.seq * forward.in.batch, strided ? kRows - kRows % 5 : kRows);
    const int64_t skipped = strided ? (kRows % 5) * kDim : 0;  // The call then ends with the rows.
    const gdn_row_strides strides = {forward.in.seq * kDim, kDim, 0, 1};
    forward.in.x = buffers[0].get<uint16_t>() + skipped;
    forward.in.gate = buffers[1].get<uint16_t>() + skipped;
    forward.in.gamma = gamma.get();
    forward.in.x_strides = forward.in.gate_strides = strides;
    forward.eps = small.eps;
    forward.y = buffers[3].get<uint16_t>() + skipped;
    forward.rstd = rstd.get<float>();
    ASSERT_EQ(gdn_gated_rms_norm_forward(&exec, &forward), GDN_OK) << gdn_last_error();
    gdn_gated_rms_norm_backward_args backward{};
    backward.in = forward.in;
    backward.rstd = forward.rstd;
    backward.dy = buffers[2].get<uint16_t>() + skipped;
    backward.dy_strides = strides;
    backward.dx = buffers[4].get<uint16_t>() + skipped;
    backward.dgate = buffers[5].get<uint16_t>() + skipped;
    backward.dgamma = dgamma.get();
    ASSERT_EQ(gdn_gated_rms_norm_backward_workspace(&exec, &backward, &exec.workspace_bytes),
              GDN_OK);
    const DeviceBuffer workspace(exec.workspace_bytes);
    exec.workspace = workspace.get();
    ASSERT_EQ(gdn_gated_rms_norm_backward(&exec, &backward), GDN_OK) << gdn_last_error();
    stream.Synchronize();
    for (const auto& [buffer, guarded] :
         {std::pair{3, &expected.y}, std::pair{4, &expected.dx}, std::pair{5, &expected.dgate}}) {
      std::vector<uint8_t> got(kTail * kDim * 2);
      Must(cudaMemcpy(got.data(), buffers[static_cast<size_t>(buffer)].get<uint16_t>() + kFirst,
                      got.size(), cudaMemcpyDeviceToHost));
      EXPECT_TRUE(got == guarded->bytes()) << "buffer " << buffer << " strided " << strided;
      Must(cudaMemset(buffers[static_cast<size_t>(buffer)].get(), 0xff, bytes));
    }
  }
}

}  // namespace
}  // namespace gdn::kernels
