// What a training step launches on a GPU: the fused kernels and no other, counted in the graphs
// that its calls make.
#include <string>
#include <vector>

#include "tests/training/layer.h"

namespace gdn::kernels {
namespace {

using TrainingLaunchesCuda = CudaTest;

const LayerShape kShape = {{1, 127, 129}, 128, 2, 2, 128, 128};

std::vector<Launches> LaunchesOf(const Step& step, const std::string& op) {
  std::vector<Launches> found;
  for (const Launches& launches : step.launches) {
    if (launches.op == op) found.push_back(launches);
  }
  return found;
}
// Kernels launched by each of the calls of an op; other nodes are none.
std::vector<size_t> Kernels(const Step& step, const std::string& op) {
  std::vector<size_t> counts;
  for (const Launches& launches : LaunchesOf(step, op)) {
    counts.push_back(launches.kernels.size());
    EXPECT_EQ(launches.others, 0) << op;
  }
  return counts;
}
bool Launched(const Step& step, const std::string& op, const std::string& kernel) {
  for (const Launches& launches : LaunchesOf(step, op)) {
    for (const std::string& name : launches.kernels) {
      if (name.find(kernel) != std::string::npos) return true;
    }
  }
  return false;
}

using Counts = std::vector<size_t>;

// B28, liveness: each op's kernels, and how few. A replayed graph gives the bits of the plain
// calls.
TEST_F(TrainingLaunchesCuda, FusedKernelsRanAndNoOthers) {
  const LayerData data(kShape, 6);
  for (const gdn_rule_variant route : {GDN_RULE_GDN, GDN_RULE_GDN2}) {
    const Step step = TrainingStep(Tested(), data, {.norm_route = route, .from_graphs = true});
    EXPECT_EQ(Kernels(step, "causal_conv"), Counts({1, 1}));
    EXPECT_EQ(Kernels(step, "gates"), Counts({1}));
    EXPECT_EQ(Kernels(step, "gated_rms_norm_forward"), Counts({1}));
    EXPECT_TRUE(Launched(step, "gated_rms_norm_forward", "ForwardRows"));
    EXPECT_EQ(Kernels(step, "gated_rms_norm_backward"), Counts({2}));
    EXPECT_TRUE(Launched(step, "gated_rms_norm_backward", "BackwardRows"));
    EXPECT_TRUE(Launched(step, "delta_rule_forward", "delta_rule_chunk"));
    EXPECT_TRUE(Launched(step, "delta_rule_backward", "StateGradientsKernel"));
    EXPECT_TRUE(Launched(step, "delta_rule_backward", "KeysKernel"));
    EXPECT_EQ(Kernels(step, "gates_backward"), Counts({2}));
    EXPECT_EQ(Kernels(step, "causal_conv_backward"), Counts({2, 2}));
    EXPECT_TRUE(LaunchesOf(step, "rms_norm").empty());

    const Step plain = TrainingStep(Tested(), data, {.norm_route = route});
    for (const auto& [name, expected] : plain.results) {
      EXPECT_TRUE(step.results.at(name).bytes() == expected.bytes()) << name;
    }
  }
}

// A1, A7, A12: on the kernel's route q and k have no launch of their own but the norm inside the
// rule's forward; its backward goes through the norm in the kernels that are there anyway.
TEST_F(TrainingLaunchesCuda, A12NormOfTheKernelsRouteIsInsideTheRule) {
  const LayerData data(kShape, 6);
  const Step in_kernel = TrainingStep(Tested(), data, {.from_graphs = true});
  const Step by_caller =
      TrainingStep(Tested(), data, {.norm_route = GDN_RULE_GDN2, .from_graphs = true});
  EXPECT_EQ(Kernels(in_kernel, "qk_norm_prepare"), Counts({0}));
  EXPECT_EQ(Kernels(by_caller, "qk_norm_prepare"), Counts({1}));
  EXPECT_TRUE(LaunchesOf(in_kernel, "l2_norm_backward").empty());
  EXPECT_EQ(Kernels(by_caller, "l2_norm_backward"), Counts({1}));
  const auto rule = [](const Step& step, const char* op) {
    return LaunchesOf(step, op).at(0).kernels;
  };
  EXPECT_EQ(rule(in_kernel, "delta_rule_forward").size(),
            rule(by_caller, "delta_rule_forward").size() + 1);
  EXPECT_TRUE(Launched(in_kernel, "delta_rule_forward", "NormKernel"));
  EXPECT_FALSE(Launched(by_caller, "delta_rule_forward", "NormKernel"));
  EXPECT_EQ(rule(in_kernel, "delta_rule_backward"), rule(by_caller, "delta_rule_backward"));
}

// B22: a recomputed norm runs twice, and nothing else does.
TEST_F(TrainingLaunchesCuda, B22RecomputedNormRunsTwice) {
  const LayerData data(kShape, 6);
  const Step kept = TrainingStep(Tested(), data, {.from_graphs = true});
  const Step again = TrainingStep(Tested(), data, {.recompute_norm = true, .from_graphs = true});
  EXPECT_EQ(Kernels(kept, "gated_rms_norm_forward"), Counts({1}));
  EXPECT_EQ(Kernels(again, "gated_rms_norm_forward"), Counts({1, 1}));
  EXPECT_EQ(again.launches.size(), kept.launches.size() + 1);
  for (const auto& [name, expected] : kept.results) {
    EXPECT_TRUE(again.results.at(name).bytes() == expected.bytes()) << name;
  }
}

// The composition takes two kernels for what the fused forward does in one.
TEST_F(TrainingLaunchesCuda, ComposedNormTakesMoreKernels) {
  const LayerData data(kShape, 6);
  const Step composed = TrainingStep(Tested(), data, {.composed_norm = true, .from_graphs = true});
  EXPECT_EQ(Kernels(composed, "rms_norm"), Counts({1}));
  EXPECT_EQ(Kernels(composed, "silu_mul"), Counts({1, 1}));  // y, and the norm's gradient
}

}  // namespace
}  // namespace gdn::kernels
