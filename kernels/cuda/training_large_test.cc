// X6: tensors of more than 2^31 elements, and rows further apart than that, beside a small call on
// the same last rows.
#include <algorithm>
#include <array>

#include "kernels/cuda/training_ops_test_util.h"

namespace gdn::kernels {
namespace {

using TrainingLargeCuda = CudaTest;

constexpr int64_t kDim = 128;
constexpr int64_t kRows = (int64_t{1} << 24) + 5;
constexpr int64_t kTail = 7;

// Where the device has less memory the test is skipped; with GDN_REQUIRE_GPU=1 it fails.
bool HasMemory(size_t bytes) {
  const std::string reason = WhyNoMemory(bytes);
  if (reason.empty()) return true;
  if (GpuIsRequired()) {
    ADD_FAILURE() << reason << ", and GDN_REQUIRE_GPU=1";
  } else {
    [&] { GTEST_SKIP() << reason; }();
  }
  return false;
}

// BF16 rows of kDim elements in one buffer: many next to each other, or two far apart.
struct LargeRows {
  int64_t rows, stride, tail;
  int64_t First() const { return (rows - tail) * stride; }
  size_t bytes() const { return static_cast<size_t>(((rows - 1) * stride + kDim) * 2); }

  // Ordinary numbers everywhere, those of `small` in the last rows.
  DeviceBuffer With(const Tensor& small) const {
    DeviceBuffer all(bytes());
    Must(cudaMemset(all.get(), 0x3c, bytes()));
    Must(cudaMemcpy2D(all.get<uint16_t>() + First(), static_cast<size_t>(stride) * 2, small.data(),
                      kDim * 2, kDim * 2, static_cast<size_t>(tail), cudaMemcpyHostToDevice));
    Must(cudaDeviceSynchronize());  // The tests' streams do not wait for it.
    return all;
  }
  DeviceBuffer Poisoned() const {
    DeviceBuffer all(bytes());
    Must(cudaMemset(all.get(), 0xff, bytes()));
    Must(cudaDeviceSynchronize());
    return all;
  }
  void ExpectLastRows(const DeviceBuffer& all, const Tensor& expected, const char* name) const {
    Tensor got(GDN_BF16, tail * kDim);
    Must(cudaMemcpy2D(got.data(), kDim * 2, all.get<uint16_t>() + First(),
                      static_cast<size_t>(stride) * 2, kDim * 2, static_cast<size_t>(tail),
                      cudaMemcpyDeviceToHost));
    for (int64_t i = 0; i < got.size(); ++i) ASSERT_TRUE(std::isfinite(got.Get(i))) << name;
    EXPECT_TRUE(got.bytes() == expected.bytes()) << name << ", row stride " << stride;
  }
};
constexpr LargeRows kLarge[] = {{kRows, kDim, kTail}, {2, (int64_t{1} << 31) + 256, 2}};

TEST_F(TrainingLargeCuda, X6GatedNorm) {
  Problem small;
  small.shape = {1, kTail, 1, kDim};
  Random random(21);
  small.Fill(random);
  const Results expected = RunBoth(Tested(), small);
  const auto bytes = static_cast<size_t>(kRows * kDim * 2);
  if (!HasMemory(7 * bytes)) return;
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
    Must(cudaDeviceSynchronize());
  }
}

TEST_F(TrainingLargeCuda, X6L2Norm) {
  for (const LargeRows& large : kLarge) {
    if (!HasMemory(5 * large.bytes())) return;
    const Tensor x = Normal(50, GDN_BF16, large.tail * kDim);
    const Tensor dy = Normal(51, GDN_BF16, large.tail * kDim);
    const Stream stream;
    const gdn_exec exec = stream.Exec();
    const auto run = [&](int64_t rows, int64_t stride, const DeviceBuffer& from,
                         const DeviceBuffer& gradient, const DeviceBuffer& y,
                         const DeviceBuffer& dx) {
      const DeviceBuffer rstd(static_cast<size_t>(rows) * sizeof(float));
      gdn_l2_norm_args forward{};
      forward.rows = rows;
      forward.dim = kDim;
      forward.x = from.get();
      forward.y = y.get();
      forward.x_dtype = forward.y_dtype = GDN_BF16;
      forward.x_row_stride = forward.y_row_stride = stride;
      forward.rstd = rstd.get<float>();
      forward.eps = 1e-6f;
      forward.scale = 1.0f;
      ASSERT_EQ(gdn_l2_norm(&exec, &forward), GDN_OK) << gdn_last_error();
      const gdn_l2_norm_backward_args backward = {
          rows,     kDim,   y.get(),  GDN_BF16, stride, forward.rstd, gradient.get(),
          GDN_BF16, stride, dx.get(), GDN_BF16, stride, 1.0f};
      ASSERT_EQ(gdn_l2_norm_backward(&exec, &backward), GDN_OK) << gdn_last_error();
      stream.Synchronize();
    };
    const LargeRows dense = {large.tail, kDim, large.tail};
    const DeviceBuffer small_y = dense.Poisoned(), small_dx = dense.Poisoned();
    run(large.tail, kDim, DeviceBuffer(x), DeviceBuffer(dy), small_y, small_dx);
    Tensor expected_y = x, expected_dx = dy;
    small_y.Download(expected_y.data());
    small_dx.Download(expected_dx.data());
    const DeviceBuffer y = large.Poisoned(), dx = large.Poisoned();
    run(large.rows, large.stride, large.With(x), large.With(dy), y, dx);
    large.ExpectLastRows(y, expected_y, "y");
    large.ExpectLastRows(dx, expected_dx, "dx");
  }
}

// The last rows are a sequence of their own, whose state and its gradient are compared too.
TEST_F(TrainingLargeCuda, X6Convolution) {
  constexpr int64_t kSlot = 3 * kDim;
  for (const LargeRows& large : kLarge) {
    if (!HasMemory(6 * large.bytes())) return;
    const Tensor x = Normal(52, GDN_BF16, large.tail * kDim);
    const Tensor d_y = Normal(53, GDN_BF16, large.tail * kDim);
    const Tensor pool = Normal(54, GDN_BF16, 4 * kSlot);
    const DeviceBuffer weight(Normal(55, GDN_F32, kDim * 4));
    const DeviceBuffer d_final(Normal(56, GDN_F32, 2 * kSlot));
    const DeviceBuffer read(std::vector<int64_t>{0, 1}), write(std::vector<int64_t>{2, 3});
    const Stream stream;
    // The bytes of the last sequence's new state and of the gradient of its old one.
    const auto run = [&](int64_t tokens, int64_t stride, const DeviceBuffer& from,
                         const DeviceBuffer& gradient, const DeviceBuffer& y,
                         const DeviceBuffer& d_x) {
      const std::vector<int32_t> host_cu = {0, static_cast<int32_t>(tokens - large.tail),
                                            static_cast<int32_t>(tokens)};
      const DeviceBuffer cu(host_cu), state(pool);
      gdn_causal_conv_args forward{};
      forward.sequences = 2;
      forward.cu_seqlens = cu.get<int32_t>();
      forward.channels = kDim;
      forward.width = 4;
      forward.silu = 1;
      forward.x = from.get();
      forward.y = y.get();
      forward.x_dtype = forward.y_dtype = GDN_BF16;
      forward.x_token_stride = forward.y_token_stride = stride;
      forward.weight = weight.get<float>();
      forward.state = state.get();
      forward.state_slot_stride = kSlot;
      forward.read_index = read.get<int64_t>();
      forward.write_index = write.get<int64_t>();
      gdn_exec exec = stream.Exec();
      EXPECT_EQ(gdn_causal_conv(&exec, &forward), GDN_OK) << gdn_last_error();
      const DeviceBuffer d_weight(kDim * 4 * sizeof(float));
      const DeviceBuffer d_state(2 * kSlot * sizeof(float));
      gdn_causal_conv_backward_args backward{};
      backward.sequences = 2;
      backward.cu_seqlens = forward.cu_seqlens;
      backward.channels = kDim;
      backward.width = 4;
      backward.silu = 1;
      backward.x = from.get();
      backward.x_dtype = backward.d_y_dtype = backward.d_x_dtype = GDN_BF16;
      backward.x_token_stride = backward.d_y_token_stride = backward.d_x_token_stride = stride;
      backward.weight = forward.weight;
      backward.initial_state = state.get();  // of slots 0 and 1
      backward.d_y = gradient.get();
      backward.d_final_state = d_final.get<float>();
      backward.d_x = d_x.get();
      backward.d_weight = d_weight.get<float>();
      backward.d_initial_state = d_state.get<float>();
      EXPECT_EQ(gdn_causal_conv_backward_workspace(&exec, &backward, &exec.workspace_bytes),
                GDN_OK);
      const DeviceBuffer workspace(exec.workspace_bytes);
      exec.workspace = workspace.get();
      EXPECT_EQ(gdn_causal_conv_backward(&exec, &backward), GDN_OK) << gdn_last_error();
      stream.Synchronize();
      Tensor states = pool, gradients(GDN_F32, 2 * kSlot);
      state.Download(states.data());
      d_state.Download(gradients.data());
      return std::array{states.Slice(3 * kSlot, 4 * kSlot), gradients.Slice(kSlot, 2 * kSlot)};
    };
    const LargeRows dense = {large.tail, kDim, large.tail};
    const DeviceBuffer small_y = dense.Poisoned(), small_d_x = dense.Poisoned();
    const auto expected =
        run(large.tail, kDim, DeviceBuffer(x), DeviceBuffer(d_y), small_y, small_d_x);
    Tensor expected_y = x, expected_d_x = d_y;
    small_y.Download(expected_y.data());
    small_d_x.Download(expected_d_x.data());
    const DeviceBuffer y = large.Poisoned(), d_x = large.Poisoned();
    const auto got = run(large.rows, large.stride, large.With(x), large.With(d_y), y, d_x);
    large.ExpectLastRows(y, expected_y, "y");
    large.ExpectLastRows(d_x, expected_d_x, "d_x");
    EXPECT_TRUE(got == expected) << "states, token stride " << large.stride;
  }
}

}  // namespace
}  // namespace gdn::kernels
