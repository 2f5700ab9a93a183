// Gated RMSNorm for training: every bad argument is refused by name before anything is written.
#include "kernels/gated_rms_norm_training_test_util.h"

namespace gdn::kernels {
namespace {

GDN_BACKEND_SUITE(GatedRmsNormMisuse);

const auto kBad = GDN_INVALID_ARGUMENT;
constexpr int64_t kHuge = int64_t{1} << 40;

Problem Good() {
  Problem p;
  p.shape = {2, 3, 2, 128};
  Random random(70);
  p.Fill(random);
  return p;
}

bool Untouched(const Guarded& output) {
  for (const uint8_t byte : output.bytes()) {
    if (byte != 0xff) return false;
  }
  return true;
}

void ExpectSentence(gdn_status got, gdn_status expected, const std::string& sentence) {
  EXPECT_EQ(got, expected) << sentence;
  EXPECT_THAT(gdn_last_error(), testing::HasSubstr(sentence));
}

void* Moved(const void* pointer, int64_t bytes) {
  return const_cast<char*>(static_cast<const char*>(pointer)) + bytes;
}

GDN_BACKEND_TEST(GatedRmsNormMisuse, B19ForwardRefusesByName) {
  const Problem p = Good();
  for (const gdn_backend backend : CheckingBackends()) {
    const Execution execution({"", backend, 0});
    auto refused = [&](gdn_status status, const char* sentence, auto change) {
      Results r;
      float scale = 1.0f;
      gdn_gated_rms_norm_forward_args args = ForwardArgs(p, r);
      args.fp8_scale = &scale;
      change(args, r);
      ExpectSentence(gdn_gated_rms_norm_forward(execution.exec(), &args), status, sentence);
      EXPECT_TRUE(Untouched(r.y) && Untouched(r.rstd)) << sentence;
    };
    refused(kBad, "batch must be in 0..2^40, got -1", [](auto& a, auto&) { a.in.batch = -1; });
    refused(kBad, "seq must be in", [](auto& a, auto&) { a.in.seq = -1; });
    refused(kBad, "heads must be in 1..2^40, got 0", [](auto& a, auto&) { a.in.heads = 0; });
    refused(kBad, "dim must be in 1..2^40, got 0", [](auto& a, auto&) { a.in.dim = 0; });
    refused(GDN_UNSUPPORTED_SHAPE, "dim must be at most 8192, got 8193",
            [](auto& a, auto&) { a.in.dim = 8193; });
    refused(kBad, "beyond 64 bits", [](auto& a, auto&) { a.in.batch = a.in.seq = kHuge; });
    refused(kBad, "x_dtype", [](auto& a, auto&) { a.in.x_dtype = Unlisted<gdn_dtype>(9); });
    refused(kBad, "gate_dtype", [](auto& a, auto&) { a.in.gate_dtype = Unlisted<gdn_dtype>(9); });
    refused(kBad, "gamma_dtype", [](auto& a, auto&) { a.in.gamma_dtype = Unlisted<gdn_dtype>(3); });
    refused(GDN_UNSUPPORTED_TYPE, "gate_dtype must be x_dtype (1) or GDN_F32 (0), got 2",
            [](auto& a, auto&) { a.in.gate_dtype = GDN_F16; });
    refused(kBad, "activation must be SILU (0) or SIGMOID (1), got 4",
            [](auto& a, auto&) { a.in.activation = Unlisted<gdn_gate_activation>(4); });
    refused(kBad, "eps", [](auto& a, auto&) { a.eps = -1e-6f; });
    refused(kBad, "eps", [](auto& a, auto&) { a.eps = NAN; });
    refused(kBad, "x must not be NULL", [](auto& a, auto&) { a.in.x = nullptr; });
    refused(kBad, "gate must not be NULL", [](auto& a, auto&) { a.in.gate = nullptr; });
    refused(kBad, "gamma must not be NULL", [](auto& a, auto&) { a.in.gamma = nullptr; });
    refused(kBad, "y must not be NULL", [](auto& a, auto&) { a.y = nullptr; });
    refused(kBad, "x must be aligned", [](auto& a, auto&) { a.in.x = Moved(a.in.x, 1); });
    refused(kBad, "gate must be aligned to its element of 4 bytes", [](auto& a, auto&) {
      a.in.gate_dtype = GDN_F32;
      a.in.gate = Moved(a.in.gate, 2);
    });
    refused(kBad, "gamma must be aligned",
            [](auto& a, auto&) { a.in.gamma = Moved(a.in.gamma, 2); });
    refused(kBad, "x_strides.seq must be >= 0, got -1",
            [](auto& a, auto&) { a.in.x_strides.seq = -1; });
    refused(kBad, "gate_strides.element must be >= 0",
            [](auto& a, auto&) { a.in.gate_strides.element = -2; });
    refused(kBad, "gate_strides.batch", [](auto& a, auto&) { a.in.gate_strides.batch = -9; });
    refused(kBad, "x_strides.head", [](auto& a, auto&) { a.in.x_strides.head = INT64_MAX; });
    refused(kBad, "y must not overlap x", [](auto& a, auto&) { a.y = Moved(a.in.x, 0); });
    refused(kBad, "y must not overlap gate", [](auto& a, auto&) { a.y = Moved(a.in.gate, 6); });
    refused(kBad, "y must not overlap gamma", [](auto& a, auto&) { a.y = Moved(a.in.gamma, 0); });
    refused(kBad, "rstd must not overlap y",
            [](auto& a, auto&) { a.rstd = static_cast<float*>(Moved(a.y, 4)); });
    refused(kBad, "amax must not overlap rstd", [](auto& a, auto&) { a.amax = a.rstd + 11; });
    refused(kBad, "fp8 must be", [](auto& a, auto&) { a.fp8 = Unlisted<gdn_fp8_scaling>(3); });
    refused(GDN_UNSUPPORTED_SHAPE, "one FP8 scale per row needs dim 128, got 64",
            [](auto& a, auto&) {
              a.fp8 = GDN_FP8_ROW;
              a.in.dim = 64;
            });
    refused(kBad, "fp8_scale_inv must not be NULL", [](auto& a, auto&) { a.fp8 = GDN_FP8_ROW; });
    refused(kBad, "fp8_scale must not be NULL", [](auto& a, auto&) {
      a.fp8 = GDN_FP8_STATIC;
      a.fp8_scale = nullptr;
    });
    EXPECT_EQ(gdn_gated_rms_norm_forward(execution.exec(), nullptr), kBad);
  }
}

GDN_BACKEND_TEST(GatedRmsNormMisuse, B19BackwardRefusesByName) {
  const Problem p = Good();
  for (const gdn_backend backend : CheckingBackends()) {
    Execution execution({"", backend, 0});
    Results forward;
    RunForward(execution, p, forward);
    auto refused = [&](gdn_status status, const char* sentence, auto change) {
      Results r;
      r.rstd = forward.rstd;
      gdn_gated_rms_norm_backward_args args = BackwardArgs(p, r);
      size_t bytes = 0;
      ASSERT_EQ(gdn_gated_rms_norm_backward_workspace(execution.exec(), &args, &bytes), GDN_OK);
      execution.SetWorkspace(bytes);
      change(args);
      ExpectSentence(gdn_gated_rms_norm_backward(execution.exec(), &args), status, sentence);
      EXPECT_TRUE(Untouched(r.dx) && Untouched(r.dgate) && Untouched(r.dgamma)) << sentence;
    };
    refused(kBad, "batch must be", [](auto& a) { a.in.batch = -1; });
    refused(GDN_UNSUPPORTED_SHAPE, "dim must be at most 8192", [](auto& a) { a.in.dim = 9000; });
    refused(kBad, "x_dtype", [](auto& a) { a.in.x_dtype = Unlisted<gdn_dtype>(-1); });
    refused(GDN_UNSUPPORTED_TYPE, "gate_dtype", [](auto& a) { a.in.gate_dtype = GDN_F16; });
    refused(kBad, "activation",
            [](auto& a) { a.in.activation = Unlisted<gdn_gate_activation>(2); });
    refused(kBad, "x must not be NULL", [](auto& a) { a.in.x = nullptr; });
    refused(kBad, "gate must not be NULL", [](auto& a) { a.in.gate = nullptr; });
    refused(kBad, "gamma must not be NULL", [](auto& a) { a.in.gamma = nullptr; });
    refused(kBad, "rstd must not be NULL", [](auto& a) { a.rstd = nullptr; });
    refused(kBad, "dy must not be NULL", [](auto& a) { a.dy = nullptr; });
    refused(kBad, "dx must not be NULL", [](auto& a) { a.dx = nullptr; });
    refused(kBad, "dgate must not be NULL", [](auto& a) { a.dgate = nullptr; });
    refused(kBad, "dgamma must not be NULL", [](auto& a) { a.dgamma = nullptr; });
    refused(kBad, "dy_strides.head must be >= 0", [](auto& a) { a.dy_strides.head = -128; });
    refused(kBad, "dx must be aligned", [](auto& a) { a.dx = Moved(a.dx, 1); });
    refused(kBad, "dx must not overlap dy", [](auto& a) { a.dx = Moved(a.dy, 0); });
    refused(kBad, "dx must not overlap x", [](auto& a) { a.dx = Moved(a.in.x, 2); });
    refused(kBad, "dgate must not overlap dx", [](auto& a) { a.dgate = a.dx; });
    refused(kBad, "dgamma must not overlap rstd", [](auto& a) { a.dgamma = Moved(a.rstd, 0); });
  }
}

GDN_BACKEND_TEST(GatedRmsNormMisuse, B28WorkspaceProtocol) {
  const Problem p = Good();
  Execution execution(Tested(2));
  Results r;
  RunForward(execution, p, r);
  gdn_gated_rms_norm_backward_args args = BackwardArgs(p, r);
  gdn_gated_rms_norm_backward_args extents{};  // the query needs no pointer
  extents.in.batch = p.shape.batch;
  extents.in.seq = p.shape.seq;
  extents.in.heads = p.shape.heads;
  extents.in.dim = p.shape.dim;
  size_t bytes = 0;
  ASSERT_EQ(gdn_gated_rms_norm_backward_workspace(execution.exec(), &extents, &bytes), GDN_OK);
  ASSERT_GT(bytes, 0u);
  const std::string needed = std::to_string(bytes);
  EXPECT_EQ(gdn_gated_rms_norm_backward(execution.exec(), &args), GDN_WORKSPACE_TOO_SMALL);
  execution.SetWorkspace(bytes + 64);
  execution.mutable_exec()->workspace_bytes = bytes - 1;
  ExpectSentence(gdn_gated_rms_norm_backward(execution.exec(), &args), GDN_WORKSPACE_TOO_SMALL,
                 needed);
  execution.mutable_exec()->workspace_bytes = bytes;
  void* const aligned = execution.exec()->workspace;
  execution.mutable_exec()->workspace = Moved(aligned, 4);
  EXPECT_EQ(gdn_gated_rms_norm_backward(execution.exec(), &args), kBad);
  execution.mutable_exec()->workspace = aligned;
  EXPECT_TRUE(Untouched(r.dx) && Untouched(r.dgate) && Untouched(r.dgamma));
  EXPECT_EQ(Backward(execution, p, r, args), GDN_OK) << gdn_last_error();
  EXPECT_EQ(gdn_gated_rms_norm_backward_workspace(execution.exec(), &extents, nullptr), kBad);
  extents.in.dim = -1;
  bytes = 77;
  EXPECT_EQ(gdn_gated_rms_norm_backward_workspace(execution.exec(), &extents, &bytes), kBad);
  EXPECT_EQ(bytes, 77u);
}

// No other back end steps in: an unknown one is refused, by a sentence that names the op.
GDN_BACKEND_TEST(GatedRmsNormMisuse, NoSilentBackend) {
  const Problem p = Good();
  {
    gdn_exec exec{};
    exec.backend = Unlisted<gdn_backend>(77);
    Results r;
    const gdn_gated_rms_norm_forward_args forward = ForwardArgs(p, r);
    ExpectSentence(gdn_gated_rms_norm_forward(&exec, &forward), GDN_BACKEND_UNAVAILABLE,
                   "gated_rms_norm_forward: ");
    EXPECT_TRUE(Untouched(r.y));
    const gdn_gated_rms_norm_backward_args backward = BackwardArgs(p, r);
    size_t bytes = 5;
    ExpectSentence(gdn_gated_rms_norm_backward(&exec, &backward), GDN_BACKEND_UNAVAILABLE,
                   "gated_rms_norm_backward: ");
    ExpectSentence(gdn_gated_rms_norm_backward_workspace(&exec, &backward, &bytes),
                   GDN_BACKEND_UNAVAILABLE, "gated_rms_norm_backward: ");
    EXPECT_TRUE(Untouched(r.dx) && Untouched(r.dgamma) && bytes == 5);
  }
}

}  // namespace
}  // namespace gdn::kernels
