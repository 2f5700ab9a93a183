// Where q and k are normalised: the pairs of flags, exactly once, and the form of eps. Values alone
// would not show a norm applied twice, hence the flags are asserted.
#include "gdn/kernels/qk_norm_route.h"

#include <cmath>
#include <vector>

#include "gdn/kernels/delta_rule.h"
#include "gdn/kernels/l2_norm.h"
#include "kernels/linear_test_util.h"
#include "kernels/op_call_test_util.h"

namespace gdn::kernels {
namespace {

GDN_BACKEND_SUITE(QkNormRoute);

gdn_status Prepare(const Backend& backend, gdn_qk_norm_prepare_args args, Tensor& qk,
                   gdn_qk_norm_route* route, std::vector<float>* rstd = nullptr) {
  std::vector<HostRange> ranges = {Out(qk)};
  if (rstd != nullptr) ranges.push_back(Out(*rstd));
  const auto prepare = [route](const gdn_exec* exec, const gdn_qk_norm_prepare_args* given) {
    return gdn_qk_norm_prepare(exec, given, route);
  };
  return CallOp(Execution(backend), prepare, args, ranges, {args.qk, args.rstd});
}

constexpr int64_t kTokens = 9, kHeads = 2, kValueHeads = 4, kDim = 16;

gdn_qk_norm_route Route(gdn_rule_variant variant, int32_t use) {
  gdn_qk_norm_route route{-1, -1, -1};
  EXPECT_EQ(gdn_qk_norm_route_of(variant, use, &route), GDN_OK) << gdn_last_error();
  return route;
}

GDN_BACKEND_TEST(QkNormRoute, A12A13GdnDefersToItsKernelAndGdn2NormalisesInTheCaller) {
  for (const int32_t use : {0, 1, 7}) {
    const gdn_qk_norm_route gdn = Route(GDN_RULE_GDN, use);
    EXPECT_EQ(gdn.defer_to_kernel, 1);
    EXPECT_EQ(gdn.use_qk_l2norm_in_kernel, use ? 1 : 0);
    EXPECT_EQ(gdn.normalize_in_caller, 0);
    const gdn_qk_norm_route gdn2 = Route(GDN_RULE_GDN2, use);
    EXPECT_EQ(gdn2.defer_to_kernel, 0);
    EXPECT_EQ(gdn2.use_qk_l2norm_in_kernel, 0);
    EXPECT_EQ(gdn2.normalize_in_caller, use ? 1 : 0);
  }
}

GDN_BACKEND_TEST(QkNormRoute, A14ExactlyOnePlaceNormalises) {
  for (const gdn_rule_variant variant : {GDN_RULE_GDN, GDN_RULE_GDN2}) {
    for (const int32_t use : {0, 1}) {
      const gdn_qk_norm_route route = Route(variant, use);
      EXPECT_EQ(route.normalize_in_caller + route.use_qk_l2norm_in_kernel, use);
    }
  }
}

// q|k and the rest of a layer's rule, from raw q and k.
struct Layer {
  Tensor qk, v, o, state;
  std::vector<float> g, beta;
  int64_t token_stride;

  explicit Layer(gdn_dtype dtype, int64_t gap = 0)
      : qk(dtype, kTokens * (2 * kHeads * kDim + gap)),
        v(dtype, kTokens * kValueHeads * kDim),
        o(dtype, kTokens * kValueHeads * kDim),
        state(GDN_F32, kValueHeads * kDim * kDim),
        token_stride(2 * kHeads * kDim + gap) {
    Random random(80);
    for (int64_t token = 0; token < kTokens; ++token) {
      // q times 3 and k times 1/2: the norm has work to do.
      for (int64_t i = 0; i < 2 * kHeads * kDim; ++i) {
        qk.Set(token * token_stride + i, (i < kHeads * kDim ? 3.0f : 0.5f) * random.Normal());
      }
    }
    FillNormal(random, v);
    for (int64_t i = 0; i < state.size(); ++i) state.Set(i, 0.0f);
    for (int64_t i = 0; i < kTokens * kValueHeads; ++i) {
      g.push_back(-random.Uniform(0.01f, 0.5f));
      beta.push_back(random.Uniform(0.1f, 0.9f));
    }
  }
  gdn_qk_norm_prepare_args PrepareArgs(gdn_rule_variant variant, int32_t use) {
    return {variant, use, kTokens, 2 * kHeads, kDim, qk.data(), qk.dtype(), token_stride, nullptr};
  }
  void Rule(const Backend& backend, int32_t use_qk_l2norm) {
    Execution execution(backend);
    const std::vector<int32_t> cu = {0, static_cast<int32_t>(kTokens)};
    const std::vector<int64_t> slot = {0};
    gdn_delta_rule_args args{};
    args.sequences = 1;
    args.cu_seqlens = cu.data();
    args.key_heads = kHeads;
    args.value_heads = kValueHeads;
    args.key_dim = args.value_dim = kDim;
    args.q = qk.data();
    args.k = static_cast<const uint8_t*>(qk.data()) + kHeads * kDim * SizeOf(qk.dtype());
    args.v = v.data();
    args.qkv_dtype = args.o_dtype = qk.dtype();
    args.q_token_stride = args.k_token_stride = token_stride;
    args.v_token_stride = args.o_token_stride = kValueHeads * kDim;
    args.g = g.data();
    args.beta = beta.data();
    args.use_qk_l2norm = use_qk_l2norm;
    args.state = state.data();
    args.state_dtype = GDN_F32;
    args.state_slot_stride = state.size();
    args.read_index = args.write_index = slot.data();
    args.o = o.data();
    size_t bytes = 0;
    ASSERT_EQ(gdn_delta_rule_prefill_workspace(execution.exec(), &args, &bytes), GDN_OK);
    execution.SetWorkspace(bytes);
    ASSERT_EQ(CallOp(execution, gdn_delta_rule_prefill, args,
                     {In(cu), In(slot), In(qk), In(v), In(g), In(beta), Out(state), Out(o)},
                     {args.cu_seqlens, args.q, args.k, args.v, args.g, args.beta, args.state,
                      args.read_index, args.write_index, args.o}),
              GDN_OK)
        << gdn_last_error();
  }
  gdn_qk_norm_route Run(const Backend& backend, gdn_rule_variant variant, int32_t use) {
    gdn_qk_norm_route route{};
    EXPECT_EQ(Prepare(backend, PrepareArgs(variant, use), qk, &route), GDN_OK) << gdn_last_error();
    Rule(backend, route.use_qk_l2norm_in_kernel);
    return route;
  }
};

double ErrorOf(const Tensor& got, const Tensor& expected) {
  RelativeL2 error;
  for (int64_t i = 0; i < got.size(); ++i) error.Add(got.Get(i), expected.Get(i));
  return error.value();
}

// A17: both routes are the same layer. In BF16 the caller's norm is rounded, the kernel's is not.
GDN_BACKEND_TEST(QkNormRoute, A17CallerAndKernelAgree) {
  for (const Backend& backend : {kRef, Tested(0)}) {
    for (const auto& [dtype, bound] : {std::pair{GDN_F32, 2e-6}, std::pair{GDN_BF16, 8e-3}}) {
      Layer in_kernel(dtype), in_caller(dtype);
      EXPECT_EQ(in_kernel.Run(backend, GDN_RULE_GDN, 1).use_qk_l2norm_in_kernel, 1);
      EXPECT_EQ(in_caller.Run(backend, GDN_RULE_GDN2, 1).normalize_in_caller, 1);
      EXPECT_LE(ErrorOf(in_caller.o, in_kernel.o), bound) << backend.name << dtype;
      EXPECT_EQ(in_kernel.qk.bytes(), Layer(dtype).qk.bytes());  // raw for the kernel (A1)
      EXPECT_NE(in_caller.qk.bytes(), Layer(dtype).qk.bytes());
      Layer never(dtype);
      never.Rule(backend, 0);
      EXPECT_GT(ErrorOf(never.o, in_kernel.o), 0.1);  // no norm at all does show
    }
  }
}

// A11: off is off; the same bits as a caller that never mentions the option.
GDN_BACKEND_TEST(QkNormRoute, A11OffIsOff) {
  for (const gdn_rule_variant variant : {GDN_RULE_GDN, GDN_RULE_GDN2}) {
    for (const Backend& backend : {kRef, Tested(0)}) {
      Layer off(GDN_BF16), never(GDN_BF16);
      off.Run(backend, variant, 0);
      never.Rule(backend, 0);
      EXPECT_EQ(off.qk.bytes(), never.qk.bytes());
      EXPECT_EQ(off.o.bytes(), never.o.bytes());
      EXPECT_EQ(off.state.bytes(), never.state.bytes());
    }
  }
}

GDN_BACKEND_TEST(QkNormRoute, A2CallerNormalisesEachHeadAlone) {
  for (const int64_t gap : {0, 7}) {
    for (const Backend& backend : {kRef, Tested(2)}) {
      Layer layer(GDN_F32, gap);
      const Layer raw(GDN_F32, gap);
      std::vector<float> rstd(kTokens * 2 * kHeads, -1.0f);
      gdn_qk_norm_prepare_args args = layer.PrepareArgs(GDN_RULE_GDN2, 1);
      args.rstd = rstd.data();
      gdn_qk_norm_route route{};
      ASSERT_EQ(Prepare(backend, args, layer.qk, &route, &rstd), GDN_OK) << gdn_last_error();
      for (int64_t token = 0; token < kTokens; ++token) {
        for (int64_t vector = 0; vector < 2 * kHeads; ++vector) {
          const int64_t first = token * layer.token_stride + vector * kDim;
          double sum = 0.0;
          for (int64_t i = 0; i < kDim; ++i) sum += std::pow(raw.qk.Get(first + i), 2);
          const double expected = 1.0 / std::sqrt(sum + 1e-6);
          EXPECT_NEAR(rstd[static_cast<size_t>(token * 2 * kHeads + vector)], expected,
                      1e-6 * expected);
          for (int64_t i = 0; i < kDim; ++i) {
            EXPECT_NEAR(layer.qk.Get(first + i), raw.qk.Get(first + i) * expected, 1e-6);
          }
        }
        for (int64_t i = 2 * kHeads * kDim; i < layer.token_stride; ++i) {
          EXPECT_TRUE(IsPoison(layer.qk, token * layer.token_stride + i));
        }
      }
    }
  }
}

// A5: a key head replicated for its value heads, before the norm or after it, has the same bits.
GDN_BACKEND_TEST(QkNormRoute, A5ReplicationCommutesWithTheNorm) {
  for (const Backend& backend : {kRef, Tested(0)}) {
    constexpr int64_t kWide = 100;
    Tensor one(GDN_BF16, kWide), four(GDN_BF16, 4 * kWide);
    Random random(81);
    FillNormal(random, one);
    for (int64_t i = 0; i < four.size(); ++i) four.Set(i, one.Get(i % kWide));
    for (Tensor* heads : {&one, &four}) {
      const gdn_qk_norm_prepare_args args = {
          GDN_RULE_GDN2, 1,      1, heads->size() / kWide, kWide, heads->data(), GDN_BF16,
          heads->size(), nullptr};
      gdn_qk_norm_route route{};
      ASSERT_EQ(Prepare(backend, args, *heads, &route), GDN_OK) << gdn_last_error();
    }
    for (int64_t i = 0; i < 4; ++i) {
      EXPECT_EQ(four.Slice(i * kWide, (i + 1) * kWide), one.bytes());
    }
  }
}

// A3: eps stands inside the root, on the sum. The other forms in use give 1, 0.9990 and 1 for the
// first of these rows, and 1, 0.9999 and 1 for the second.
GDN_BACKEND_TEST(QkNormRoute, A3FormOfEps) {
  for (const auto& [sum, length] : {std::pair{1e-6, 0.70711}, std::pair{1e-4, 0.99504},
                                    std::pair{1.0, 1.0}, std::pair{0.0, 0.0}}) {
    for (const Backend& backend : {kRef, Tested(0)}) {
      Tensor qk(GDN_F32, kDim);
      for (int64_t i = 0; i < kDim; ++i) {
        qk.Set(i, static_cast<float>((i % 2 ? -1.0 : 1.0) * std::sqrt(sum / kDim)));
      }
      const gdn_qk_norm_prepare_args args = {GDN_RULE_GDN2, 1,       1,    1,      kDim,
                                             qk.data(),     GDN_F32, kDim, nullptr};
      gdn_qk_norm_route route{};
      ASSERT_EQ(Prepare(backend, args, qk, &route), GDN_OK) << gdn_last_error();
      double squares = 0.0;
      for (int64_t i = 0; i < kDim; ++i) squares += std::pow(qk.Get(i), 2);
      EXPECT_NEAR(std::sqrt(squares), length, 1e-5) << backend.name << " sum " << sum;
    }
  }
}

// The kernel's norm has the same eps: one token with a zero state gives o = beta v (q.k) scale.
GDN_BACKEND_TEST(QkNormRoute, A3FormOfEpsInTheKernel) {
  for (const double sum : {1e-6, 1e-4, 1.0}) {
    for (const Backend& backend : {kRef, Tested(0)}) {
      Layer layer(GDN_F32);
      for (int64_t i = 0; i < 2 * kHeads * kDim; ++i) {
        layer.qk.Set(i, static_cast<float>(std::sqrt(sum / kDim)));
      }
      layer.Run(backend, GDN_RULE_GDN, 1);
      const double length_squared = sum / (sum + 1e-6);
      for (int64_t i = 0; i < kDim; ++i) {
        const double expected =
            layer.beta[0] * layer.v.Get(i) * length_squared / std::sqrt(double{kDim});
        EXPECT_NEAR(layer.o.Get(i), expected, 2e-6) << backend.name << " sum " << sum;
      }
    }
  }
}

GDN_BACKEND_TEST(QkNormRoute, RefusesMisuseByName) {
  gdn_qk_norm_route route{-1, -1, -1};
  EXPECT_EQ(gdn_qk_norm_route_of(Unlisted<gdn_rule_variant>(2), 1, &route), GDN_INVALID_ARGUMENT);
  EXPECT_THAT(gdn_last_error(), testing::HasSubstr("variant must be GDN (0) or GDN2 (1), got 2"));
  EXPECT_EQ(route.defer_to_kernel, -1);
  EXPECT_EQ(gdn_qk_norm_route_of(GDN_RULE_GDN, 1, nullptr), GDN_INVALID_ARGUMENT);
  Layer layer(GDN_F32);
  const Layer raw(GDN_F32);
  const Execution execution(Tested(0));
  auto refused = [&](const char* sentence, auto change) {
    gdn_qk_norm_prepare_args args = layer.PrepareArgs(GDN_RULE_GDN2, 1);
    change(args);
    EXPECT_EQ(gdn_qk_norm_prepare(execution.exec(), &args, &route), GDN_INVALID_ARGUMENT);
    EXPECT_THAT(gdn_last_error(), testing::HasSubstr(sentence));
    EXPECT_EQ(layer.qk.bytes(), raw.qk.bytes());
    EXPECT_EQ(route.defer_to_kernel, -1);
  };
  refused("variant", [](auto& a) { a.variant = Unlisted<gdn_rule_variant>(-1); });
  refused("tokens must be", [](auto& a) { a.tokens = -1; });
  refused("vectors must be", [](auto& a) { a.vectors = 0; });
  refused("key_dim must be", [](auto& a) { a.key_dim = 0; });
  refused("at most 2^40", [](auto& a) { a.vectors = a.key_dim = int64_t{1} << 40; });
  refused("dtype", [](auto& a) { a.dtype = Unlisted<gdn_dtype>(3); });
  refused("token_stride", [](auto& a) { a.token_stride = 63; });
  refused("token_stride", [](auto& a) { a.token_stride = INT64_MAX; });
  refused("qk must not be NULL", [](auto& a) { a.qk = nullptr; });
  gdn_exec unknown{};
  unknown.backend = Unlisted<gdn_backend>(77);
  const gdn_qk_norm_prepare_args args = layer.PrepareArgs(GDN_RULE_GDN, 1);
  EXPECT_EQ(gdn_qk_norm_prepare(&unknown, &args, &route), GDN_BACKEND_UNAVAILABLE);
  gdn_qk_norm_prepare_args empty = args;
  empty.variant = GDN_RULE_GDN2;
  empty.tokens = 0;
  empty.qk = nullptr;
  EXPECT_EQ(gdn_qk_norm_prepare(execution.exec(), &empty, &route), GDN_OK) << gdn_last_error();
  EXPECT_EQ(route.normalize_in_caller, 1);
}

}  // namespace
}  // namespace gdn::kernels
