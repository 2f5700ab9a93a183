// A Gated DeltaNet layer trained for one step: q and k normalised by the caller and in the kernel,
// the gated norm fused and composed, kept and recomputed; against the FP64 layer and against finite
// differences. Compiled with GDN_TEST_CUDA it runs on a GPU, else on the CPU; on REF in both.
#include "tests/training/layer.h"

namespace gdn::kernels {
namespace {

GDN_BACKEND_SUITE(TrainingLayer);

// Published for this layer in BF16: relative L2 against the exact layer.
constexpr double kOutputBound = 0.02;
constexpr double kGradientBound = 0.04;
// Published for q's and k's gradients of the rule in BF16: what the caller's norm rounds once more.
constexpr double kRouteBound = 8e-3;

const StepOptions kInKernel{};
const StepOptions kByCaller{.norm_route = GDN_RULE_GDN2};

double ErrorOf(const Tensor& got, const Tensor& expected) {
  RelativeL2 error;
  for (int64_t i = 0; i < expected.size(); ++i) error.Add(got.Get(i), expected.Get(i));
  return error.value();
}
double ErrorOf(const Tensor& got, const Doubles& expected) {
  RelativeL2 error;
  for (size_t i = 0; i < expected.size(); ++i) {
    error.Add(got.Get(static_cast<int64_t>(i)), expected[i]);
  }
  return error.value();
}

bool IsZero(const Tensor& tensor) {
  for (int64_t i = 0; i < tensor.size(); ++i) {
    if (tensor.Get(i) != 0.0f) return false;
  }
  return true;
}

// How many representable BF16 values lie between two.
int64_t UlpsApart(float a, float b) {
  const auto ordered = [](float value) -> int64_t {
    const int64_t magnitude = F32ToBf16(std::fabs(value));
    return std::signbit(value) ? -magnitude : magnitude;
  };
  return std::abs(ordered(a) - ordered(b));
}

// The extents of the rule's tensor core kernels on a GPU, small ones on the CPU, and on both those
// of the published test of the whole layer, whose heads are narrow and not square.
std::vector<LayerShape> Bf16Shapes() {
  const LayerShape wide = kOnCuda ? LayerShape{{1, 127, 129}, 128, 2, 2, 128, 128}
                                  : LayerShape{{1, 0, 17, 9}, 32, 2, 2, 32, 32};
  const LayerShape dense = kOnCuda ? LayerShape{{96, 96, 96}, 64, 1, 4, 128, 128}
                                   : LayerShape{{8, 8, 8}, 32, 1, 4, 16, 16};
  return {wide, dense, {{9, 5}, 64, 4, 2, 32, 64}};
}

// The same layer in FP64: of FP32 activations, which round 2^16 times less than BF16's.
LayerData Exact(LayerData data) {
  data.shape.dtype = GDN_F32;
  return data;
}

// A12, A13, A14: one place and no other normalises.
void ExpectRoute(const gdn_qk_norm_route& route, gdn_rule_variant variant) {
  const bool gdn = variant == GDN_RULE_GDN;
  EXPECT_EQ(route.defer_to_kernel, gdn ? 1 : 0);
  EXPECT_EQ(route.use_qk_l2norm_in_kernel, gdn ? 1 : 0);
  EXPECT_EQ(route.normalize_in_caller, gdn ? 0 : 1);
}

// Every gradient of a small layer in FP32, on REF too: what one op takes from another fits.
GDN_BACKEND_TEST(TrainingLayer, EveryGradientMatchesFiniteDifferences) {
  LayerData data({{3, 0, 5, 1}, 6, 2, 2, 4, 3, GDN_F32}, 1);
  const Doubles out = Forward64(data);
  const double loss = Loss(data, out);
  LayerData moved = data;
  std::map<std::string, Doubles> expected;
  for (const auto& [name, values] : moved.Parameters()) {
    expected["d_" + name] =
        FiniteDifferences(*values, [&] { return Loss(moved, Forward64(moved)); });
  }
  for (const Backend& backend : TestedBackendsAndRef()) {
    for (const StepOptions& options : {kInKernel, kByCaller}) {
      const Step step = TrainingStep(backend, data, options);
      ExpectRoute(step.route, options.norm_route);
      EXPECT_LE(ErrorOf(step.results.at("out"), out), 1e-6) << backend.name;
      EXPECT_NEAR(step.loss, loss, 1e-6 * loss) << backend.name;
      for (const auto& [name, gradient] : expected) {
        const double error = ErrorOf(step.results.at(name), gradient);
        RecordProperty(backend.name + "_" + name, std::to_string(error));
        EXPECT_LE(error, 3e-6) << backend.name << " " << name << " route " << options.norm_route;
      }
    }
  }
}

// A17, A18, T3: the two routes are one layer. The rule sees the same bits of q and k, and so all is
// bit-equal but what comes after q's and k's gradients, which the caller's norm rounds once more.
GDN_BACKEND_TEST(TrainingLayer, A17T3CallerAndKernelAgree) {
  for (const LayerShape& shape : Bf16Shapes()) {
    const LayerData data(shape, 2);
    const Step in_kernel = TrainingStep(Tested(3), data, kInKernel);
    const Step by_caller = TrainingStep(Tested(3), data, kByCaller);
    ExpectRoute(in_kernel.route, GDN_RULE_GDN);
    ExpectRoute(by_caller.route, GDN_RULE_GDN2);
    for (const char* name :
         {"out", "y", "d_gate", "d_o", "d_gamma", "d_out_weight", "d_a_log", "d_dt_bias"}) {
      EXPECT_TRUE(by_caller.results.at(name).bytes() == in_kernel.results.at(name).bytes())
          << name << ", key_dim " << shape.key_dim;
    }
    for (const char* name : {"d_x", "d_in_weight", "d_conv_weight", "d_conv_bias"}) {
      const double error = ErrorOf(by_caller.results.at(name), in_kernel.results.at(name));
      RecordProperty(std::string(name) + "_" + std::to_string(shape.key_dim),
                     std::to_string(error));
      EXPECT_LE(error, kRouteBound) << name << ", key_dim " << shape.key_dim;
    }
  }
}

// T12: both routes against the FP64 layer.
GDN_BACKEND_TEST(TrainingLayer, T12BothRoutesMatchTheFp64Layer) {
  for (const LayerShape& shape : Bf16Shapes()) {
    const LayerData data(shape, 2);
    const Step exact = TrainingStep(kRef, Exact(data), kInKernel);
    for (const StepOptions& options : {kInKernel, kByCaller}) {
      const Step step = TrainingStep(Tested(), data, options);
      ExpectRoute(step.route, options.norm_route);
      ASSERT_EQ(step.results.size(), exact.results.size());
      for (const auto& [name, expected] : exact.results) {
        const double error = ErrorOf(step.results.at(name), expected);
        const bool forward = name == "out" || name == "y";
        RecordProperty(
            name + "_" + std::to_string(shape.key_dim) + "_" + std::to_string(options.norm_route),
            std::to_string(error));
        EXPECT_LE(error, forward ? kOutputBound : kGradientBound)
            << name << ", key_dim " << shape.key_dim << ", route " << options.norm_route;
        EXPECT_FALSE(IsZero(expected)) << name << ": the test exercises nothing";
      }
    }
  }
}

// The layer's parameters, and x, one step along the gradients of its loss.
LayerData Stepped(LayerData data, const Step& step, double rate) {
  for (const auto& [name, values] : data.Parameters()) {
    if (name == "conv_bias") continue;  // the forward has none
    const Tensor& gradient = step.results.at("d_" + name);
    for (int64_t i = 0; i < gradient.size(); ++i) {
      (*values)[static_cast<size_t>(i)] -= rate * gradient.Get(i);
    }
  }
  return data;
}

// Master weights take the step of the BF16 gradients: the loss falls as far as with exact ones.
GDN_BACKEND_TEST(TrainingLayer, AStepLowersTheLossAsAnExactOneDoes) {
  const LayerData data(Bf16Shapes()[0], 3);
  const auto loss_of = [](const LayerData& at) { return Loss(at, Forward64(at)); };
  const Step exact = TrainingStep(kRef, Exact(data), kInKernel);
  double square = 0.0;
  for (const auto& [name, values] : LayerData(data).Parameters()) {
    const Tensor& gradient = exact.results.at("d_" + name);
    for (int64_t i = 0; i < gradient.size(); ++i) square += std::pow(gradient.Get(i), 2);
  }
  const double before = loss_of(data);
  const double rate = 0.02 * before / square;
  const double fall = before - loss_of(Stepped(data, exact, rate));
  EXPECT_GE(fall, 0.005 * before);
  for (const StepOptions& options : {kInKernel, kByCaller}) {
    const Step step = TrainingStep(Tested(), data, options);
    EXPECT_NEAR(step.loss, before, kOutputBound * before);
    EXPECT_NEAR(before - loss_of(Stepped(data, step, rate)), fall, 0.01 * fall);
  }
}

// T11, B27: the composed norm in the layer has the bits of the fused one, but for the norm's
// gradient of x, which may differ by one unit in the last place.
GDN_BACKEND_TEST(TrainingLayer, T11FusedNormIsTheComposedOne) {
  for (const LayerShape& shape : Bf16Shapes()) {
    const LayerData data(shape, 4);
    const Step fused = TrainingStep(Tested(), data, kInKernel);
    const Step composed = TrainingStep(Tested(), data, {.composed_norm = true});
    for (const char* name : {"y", "out", "d_out_weight", "d_gate"}) {
      EXPECT_TRUE(composed.results.at(name).bytes() == fused.results.at(name).bytes()) << name;
    }
    const Tensor &d_o = fused.results.at("d_o"), &d_o_composed = composed.results.at("d_o");
    int64_t one = 0;
    for (int64_t i = 0; i < d_o.size(); ++i) {
      const int64_t apart = UlpsApart(d_o.Get(i), d_o_composed.Get(i));
      ASSERT_LE(apart, 1) << "element " << i << ": " << d_o.Get(i) << " " << d_o_composed.Get(i);
      one += apart;
    }
    EXPECT_LE(one, d_o.size() / 100);
    EXPECT_LE(ErrorOf(composed.results.at("d_gamma"), fused.results.at("d_gamma")), 1e-6);
    for (const auto& [name, expected] : fused.results) {
      EXPECT_LE(ErrorOf(composed.results.at(name), expected), kRouteBound) << name;
    }
  }
}

// B22, T28: a norm that is recomputed, and a step that is repeated, with any number of threads.
GDN_BACKEND_TEST(TrainingLayer, B22T28RecomputeAndRepeatsKeepEveryBit) {
  for (const LayerShape& shape : Bf16Shapes()) {
    const LayerData data(shape, 5);
    for (const gdn_rule_variant route : {GDN_RULE_GDN, GDN_RULE_GDN2}) {
      const Step kept = TrainingStep(Tested(), data, {.norm_route = route});
      for (const bool recompute : {true, false}) {
        const Step again = TrainingStep(Tested(recompute ? 0 : 3), data,
                                        {.norm_route = route, .recompute_norm = recompute});
        for (const auto& [name, expected] : kept.results) {
          EXPECT_TRUE(again.results.at(name).bytes() == expected.bytes())
              << name << ", recompute " << recompute;
        }
      }
    }
  }
}

}  // namespace
}  // namespace gdn::kernels
