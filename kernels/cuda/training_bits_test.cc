// The training ops on a GPU: the same bits whatever runs beside them, from a graph and in any
// company of rows; and how many kernels a call launches.
#include <algorithm>
#include <tuple>

#include "kernels/cuda/training_ops_test_util.h"

namespace gdn::kernels {
namespace {

using TrainingBitsCuda = CudaTest;

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
    op.ExpectFinite(expected);
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
  EXPECT_EQ(Captured(stream, L2Forward(10, 128, GDN_BF16)).kernels, 1);
  EXPECT_EQ(Captured(stream, L2Backward(10, 128, GDN_BF16)).kernels, 1);
  EXPECT_EQ(Captured(stream, Gates(10, 4, GDN_BF16)).kernels, 1);
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

}  // namespace
}  // namespace gdn::kernels
