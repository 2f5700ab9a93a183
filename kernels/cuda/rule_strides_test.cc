// X6: the rule's and GDN2's ops with more than 2^31 elements between two tokens and between two
// slots give the bits of the same calls on dense rows.
#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/cuda_test_util.h"
#include "kernels/cuda/delta_rule_backward_chunk.h"
#include "kernels/cuda/delta_rule_chunk.h"
#include "kernels/cuda/gdn2_chunk.h"
#include "kernels/gdn2_gates_test_util.h"
#include "kernels/gdn2_test_util.h"
#include "kernels/rule_slots_test_util.h"

namespace gdn::kernels {
namespace {

const Backend kCuda{"cuda", GDN_BACKEND_CUDA, 0};
constexpr int64_t kRows = 2;  // Of every tensor here.
// Bytes between them: more than 2^32 elements of BF16 and 2^31 of FP32; rows stay on 16 bytes.
constexpr int64_t kPitch = (int64_t{1} << 33) + 32;
// The backward has seven strided tensors.
constexpr size_t kBytesNeeded = size_t{7} * (kPitch + (1 << 20));

// Copies of rows, far apart.
class WideRows {
 public:
  template <typename T>
  void In(T*& rows, int64_t& stride, int64_t width, gdn_dtype dtype) {
    Spread(rows, stride, width * SizeOf(dtype), SizeOf(dtype));
  }
  template <typename T>
  void Out(T*& rows, int64_t& stride, int64_t width, gdn_dtype dtype) {
    const auto bytes = static_cast<size_t>(width * SizeOf(dtype));
    char* const narrow = reinterpret_cast<char*>(rows);
    const int64_t narrow_pitch = stride * SizeOf(dtype);
    Spread(rows, stride, width * SizeOf(dtype), SizeOf(dtype));
    for (int64_t row = 0; row < kRows; ++row) {
      back_.push_back(
          {narrow + row * narrow_pitch, reinterpret_cast<char*>(rows) + row * kPitch, bytes});
    }
  }
  void CopyBack() const {
    Must(cudaDeviceSynchronize());
    for (const Copy& copy : back_) {
      Must(cudaMemcpy(copy.to, copy.from, copy.bytes, cudaMemcpyDeviceToDevice));
    }
    Must(cudaDeviceSynchronize());
  }

 private:
  struct Copy {
    char* to;
    const char* from;
    size_t bytes;
  };
  template <typename T>
  void Spread(T*& rows, int64_t& stride, int64_t width_bytes, int64_t element) {
    memory_.emplace_back(static_cast<size_t>((kRows - 1) * kPitch + width_bytes));
    char* const wide = memory_.back().get<char>();
    for (int64_t row = 0; row < kRows; ++row) {
      Must(cudaMemcpy(wide + row * kPitch,
                      reinterpret_cast<const char*>(rows) + row * stride * element,
                      static_cast<size_t>(width_bytes), cudaMemcpyDeviceToDevice));
    }
    rows = reinterpret_cast<T*>(wide);
    stride = kPitch / element;
  }

  std::vector<DeviceBuffer> memory_;
  std::vector<Copy> back_;
};

template <typename Args>
void WidenInputs(Args& a, WideRows& wide) {
  wide.In(a.q, a.q_token_stride, a.key_heads * a.key_dim, a.qkv_dtype);
  wide.In(a.k, a.k_token_stride, a.key_heads * a.key_dim, a.qkv_dtype);
  wide.In(a.v, a.v_token_stride, a.value_heads * a.value_dim, a.qkv_dtype);
}
void Widen(gdn_delta_rule_forward_args& a, WideRows& wide) {
  WidenInputs(a, wide);
  wide.Out(a.o, a.o_token_stride, a.value_heads * a.value_dim, a.o_dtype);
}
// On slots; as many sequences as tokens.
template <typename Args>
void WidenSlots(Args& a, WideRows& wide) {
  WidenInputs(a, wide);
  wide.Out(a.o, a.o_token_stride, a.value_heads * a.value_dim, a.o_dtype);
  wide.Out(a.state, a.state_slot_stride, a.value_heads * a.value_dim * a.key_dim, a.state_dtype);
}
void Widen(gdn_delta_rule_args& a, WideRows& wide) { WidenSlots(a, wide); }
void Widen(gdn2_args& a, WideRows& wide) { WidenSlots(a, wide); }
template <typename Args>
void WidenGradients(Args& a, WideRows& wide) {
  WidenInputs(a, wide);
  wide.In(a.d_o, a.d_o_token_stride, a.value_heads * a.value_dim, a.d_o_dtype);
  wide.Out(a.d_q, a.d_q_token_stride, a.key_heads * a.key_dim, a.d_qkv_dtype);
  wide.Out(a.d_k, a.d_k_token_stride, a.key_heads * a.key_dim, a.d_qkv_dtype);
  wide.Out(a.d_v, a.d_v_token_stride, a.value_heads * a.value_dim, a.d_qkv_dtype);
}
void Widen(gdn_delta_rule_backward_args& a, WideRows& wide) { WidenGradients(a, wide); }
void Widen(gdn2_backward_args& a, WideRows& wide) { WidenGradients(a, wide); }
void Widen(gdn2_gates_args& a, WideRows& wide) {
  wide.In(a.f, a.f_token_stride, a.gate_heads * a.key_dim, a.fbw_dtype);
  wide.In(a.b, a.b_token_stride, a.gate_heads * a.key_dim, a.fbw_dtype);
  wide.In(a.w, a.w_token_stride, a.write_width, a.fbw_dtype);
}
void Widen(gdn2_gates_backward_args& a, WideRows& wide) { Widen(a.forward, wide); }

cuda::Device ThisDevice() {
  cuda::Device device{};
  EXPECT_EQ(cuda::CurrentDevice("test", &device), GDN_OK) << gdn_last_error();
  return device;
}
// Where an op has chunked kernels, the strides must not turn them off.
template <typename Args>
void ExpectSameKernels(const Args&, const Args&) {}
void ExpectSameKernels(const gdn_delta_rule_args& a, const gdn_delta_rule_args& b) {
  EXPECT_EQ(cuda::CoversChunked(ThisDevice(), a), cuda::CoversChunked(ThisDevice(), b));
}
void ExpectSameKernels(const gdn_delta_rule_backward_args& a,
                       const gdn_delta_rule_backward_args& b) {
  EXPECT_EQ(cuda::CoversChunkedBackward(ThisDevice(), a),
            cuda::CoversChunkedBackward(ThisDevice(), b));
}
void ExpectSameKernels(const gdn2_args& a, const gdn2_args& b) {
  EXPECT_EQ(cuda::CoversChunkedGdn2(ThisDevice(), a), cuda::CoversChunkedGdn2(ThisDevice(), b));
}

template <auto kOp, typename Args>
gdn_status FarApart(const gdn_exec* exec, const Args* args) {
  Args far = *args;
  WideRows wide;
  Widen(far, wide);
  ExpectSameKernels(far, *args);
  const gdn_status status = kOp(exec, &far);
  wide.CopyBack();
  return status;
}

class RuleStridesCuda : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    const std::string reason = WhyNoMemory(kBytesNeeded);
    if (reason.empty()) return;
    if (GpuIsRequired()) {
      FAIL() << reason << ", and GDN_REQUIRE_GPU=1";
    }
    GTEST_SKIP() << reason;
  }
};

// By tokens in FP32 and BF16, and by chunks in BF16; two tokens of one sequence, and of two.
std::vector<RuleShape> Shapes() {
  std::vector<RuleShape> all;
  for (const std::vector<int32_t>& lengths : {std::vector<int32_t>{2}, {1, 1}}) {
    for (const auto& [key_dim, value_dim, dtype] :
         {std::tuple{12, 20, GDN_F32}, {12, 20, GDN_BF16}, {128, 128, GDN_BF16}}) {
      RuleShape shape;
      shape.lengths = lengths;
      shape.key_dim = key_dim;
      shape.value_dim = value_dim;
      shape.dtype = shape.d_dtype = dtype;
      shape.pad = 8;
      shape.trailing_tokens = 0;
      all.push_back(shape);
    }
  }
  return all;
}

TEST_F(RuleStridesCuda, X6Forward) {
  for (const RuleShape& shape : Shapes()) {
    const RuleProblem p(shape, 921);
    const RuleOutputs got = p.Forward(kCuda, FarApart<gdn_delta_rule_forward>);
    const RuleOutputs expected = p.Forward(kCuda);
    EXPECT_EQ(got.o, expected.o);
    EXPECT_EQ(got.state, expected.state);
    EXPECT_EQ(got.q_hat, expected.q_hat);
    EXPECT_EQ(got.k_rstd, expected.k_rstd);
  }
}

TEST_F(RuleStridesCuda, X6Backward) {
  for (const RuleShape& shape : Shapes()) {
    const RuleProblem p(shape, 923);
    const RuleGradients got = p.Backward(kCuda, FarApart<gdn_delta_rule_backward>);
    const RuleGradients expected = p.Backward(kCuda);
    EXPECT_EQ(got.q, expected.q);
    EXPECT_EQ(got.k, expected.k);
    EXPECT_EQ(got.v, expected.v);
    EXPECT_EQ(got.g, expected.g);
    EXPECT_EQ(got.beta, expected.beta);
    EXPECT_EQ(got.state, expected.state);
  }
}

TEST_F(RuleStridesCuda, X6PrefillAndStepOnSlots) {
  for (const RuleShape& shape : Shapes()) {
    if (shape.lengths.size() != kRows) continue;
    const RuleProblem p(shape, 925);
    const Gdn2Problem gdn2(shape, true, 925);
    const auto expect = [](const RuleOutputs& got, const RuleOutputs& expected) {
      EXPECT_EQ(got.o, expected.o);
      EXPECT_EQ(got.state, expected.state);
    };
    expect(RunOnSlots(p, kCuda, FarApart<gdn_delta_rule_prefill>), RunOnSlots(p, kCuda));
    expect(RunOnSlots(p, kCuda, FarApart<gdn_delta_rule_step>),
           RunOnSlots(p, kCuda, gdn_delta_rule_step));
    expect(gdn2.Forward(kCuda, FarApart<gdn_gdn2_prefill>), gdn2.Forward(kCuda));
    expect(gdn2.Forward(kCuda, FarApart<gdn_gdn2_step>), gdn2.Forward(kCuda, gdn_gdn2_step));
  }
}

TEST_F(RuleStridesCuda, X6Gdn2Backward) {
  for (const RuleShape& shape : Shapes()) {
    const Gdn2Problem p(shape, false, 927);
    const Gdn2Gradients got = p.Backward(kCuda, FarApart<gdn_gdn2_backward>);
    const Gdn2Gradients expected = p.Backward(kCuda);
    EXPECT_EQ(got.q, expected.q);
    EXPECT_EQ(got.k, expected.k);
    EXPECT_EQ(got.v, expected.v);
    EXPECT_EQ(got.g, expected.g);
    EXPECT_EQ(got.erase, expected.erase);
    EXPECT_EQ(got.write, expected.write);
    EXPECT_EQ(got.state, expected.state);
  }
}

TEST_F(RuleStridesCuda, X6Gdn2Gates) {
  for (const gdn_dtype dtype : {GDN_F32, GDN_BF16}) {
    const Gdn2GatesProblem p(GDN2_DECAY_SOFTPLUS, 929, kRows, 3, 128, 68, dtype);
    const Gdn2Gates got = p.Forward(kCuda, GDN_F32, FarApart<gdn_gdn2_gates>);
    const Gdn2Gates expected = p.Forward(kCuda);
    EXPECT_EQ(got.g, expected.g);
    EXPECT_EQ(got.erase, expected.erase);
    EXPECT_EQ(got.write, expected.write);
    const Gdn2GateGradients back = p.Backward(kCuda, FarApart<gdn_gdn2_gates_backward>);
    const Gdn2GateGradients of_rows = p.Backward(kCuda);
    EXPECT_EQ(back.f, of_rows.f);
    EXPECT_EQ(back.b, of_rows.b);
    EXPECT_EQ(back.w, of_rows.w);
    EXPECT_EQ(back.a_log, of_rows.a_log);
    EXPECT_EQ(back.dt_bias, of_rows.dt_bias);
  }
}

}  // namespace
}  // namespace gdn::kernels
