// One training step of a Gated DeltaNet layer through the C ABI, on any back end: projection,
// causal convolution, gates, delta rule, gated RMSNorm, output projection, and all of their
// gradients.
#ifndef TESTS_TRAINING_LAYER_H_
#define TESTS_TRAINING_LAYER_H_

#include <map>
#include <string>
#include <vector>

#include "gdn/kernels/qk_norm_route.h"
#include "tests/training/layer_data.h"
#include "tests/training/ops.h"

namespace gdn::kernels {

struct StepOptions {
  // Where q and k are normalised: GDN defers to the rule's kernel, GDN2 has its caller do it. The
  // rule is the gated delta rule either way.
  gdn_rule_variant norm_route = GDN_RULE_GDN;
  bool composed_norm = false;   // RMSNorm and gate as separate ops
  bool recompute_norm = false;  // in the backward, instead of keeping what the forward made
  bool from_graphs = false;     // on a GPU: capture every call, count what it launches, replay
};

struct Step {
  gdn_qk_norm_route route{};
  double loss = 0.0;
  // "out"; "d_" and a parameter's name; and of the gated norm "y", "d_gate" and "d_o".
  std::map<std::string, Tensor> results;
  std::vector<Launches> launches;
};

Step TrainingStep(const Backend& backend, const LayerData& data, const StepOptions& options);

}  // namespace gdn::kernels

#endif  // TESTS_TRAINING_LAYER_H_
