// Gated RMSNorm for training: every gradient against central differences in FP64.
#include <functional>

#include "kernels/gated_rms_norm_training_test_util.h"

namespace gdn::kernels {
namespace {

GDN_BACKEND_SUITE(GatedRmsNormGradient);

// The loss sum(y * dy) in FP64 of inputs widened to FP64: nothing here is rounded.
struct Loss {
  explicit Loss(const Problem& problem) : p(problem) {
    for (int64_t row = 0; row < p.shape.rows(); ++row) {
      for (int64_t i = 0; i < p.shape.dim; ++i) {
        x.push_back(p.x.Get(p.shape, row, i));
        gate.push_back(p.gate.Get(p.shape, row, i));
      }
    }
    for (int64_t i = 0; i < p.shape.dim; ++i) gamma.push_back(p.gamma.Get(i));
  }
  double operator()() const {
    const auto dim = static_cast<size_t>(p.shape.dim);
    double loss = 0.0;
    for (int64_t row = 0; row < p.shape.rows(); ++row) {
      const size_t first = static_cast<size_t>(row) * dim;
      double sum = 0.0;
      for (size_t i = 0; i < dim; ++i) sum += x[first + i] * x[first + i];
      const double rstd = 1.0 / std::sqrt(sum / static_cast<double>(dim) + p.eps);
      for (size_t i = 0; i < dim; ++i) {
        const double n = x[first + i] * rstd * (gamma[i] + (p.zero_centered ? 1.0 : 0.0));
        loss += n * Act(p, gate[first + i]) * p.dy.Get(p.shape, row, static_cast<int64_t>(i));
      }
    }
    return loss;
  }
  std::vector<double> Gradient(std::vector<double>& values) const {
    std::vector<double> gradient;
    for (double& value : values) {
      const double kept = value;
      constexpr double kStep = 1e-5;
      value = kept + kStep;
      const double above = (*this)();
      value = kept - kStep;
      const double below = (*this)();
      value = kept;
      gradient.push_back((above - below) / (2.0 * kStep));
    }
    return gradient;
  }
  const Problem& p;
  std::vector<double> x, gate, gamma;
};

GDN_BACKEND_TEST(GatedRmsNormGradient, F2F3EveryGradientMatchesFiniteDifferences) {
  uint32_t seed = 1;
  for (const int64_t dim : {2, 5, 16}) {
    for (int mode = 0; mode < 8; ++mode) {
      Problem p;
      p.shape = {2, 3, 2, dim};
      p.x_dtype = p.gate_dtype = p.gamma_dtype = GDN_F32;
      p.zero_centered = mode & 1;
      p.activation = mode & 2 ? GDN_GATE_SIGMOID : GDN_GATE_SILU;
      p.eps = mode & 4 ? 0.3f : 1e-6f;
      p.gate_layout = Layout::kElementStride2;
      Random random(seed++);
      p.Fill(random);
      Loss loss(p);
      const std::vector<double> dx = loss.Gradient(loss.x);
      const std::vector<double> dgate = loss.Gradient(loss.gate);
      const std::vector<double> dgamma = loss.Gradient(loss.gamma);
      for (const Backend& backend : {kRef, Tested(0)}) {
        const Results got = RunBoth(backend, p);
        EXPECT_LE(ErrorOf(got.dx, dx), 3e-6) << backend.name << " dim " << dim << " mode " << mode;
        EXPECT_LE(ErrorOf(got.dgate, dgate), 1e-6) << backend.name << " dim " << dim;
        EXPECT_LE(ErrorOf(got.dgamma, dgamma), 1e-6) << backend.name << " dim " << dim;
      }
    }
  }
}

// The gradient of a gate shared by all heads is the sum of dgate over the heads.
GDN_BACKEND_TEST(GatedRmsNormGradient, B15SumOverTheBroadcastAxisIsTheGradient) {
  Problem p;
  p.shape = {1, 3, 4, 8};
  p.x_dtype = p.gate_dtype = GDN_F32;
  p.gate_layout = Layout::kBroadcastHeads;
  Random random(50);
  p.Fill(random);
  const Results got = RunBoth(Tested(0), p);
  const double step = 1e-5;
  for (int64_t seq = 0; seq < 3; ++seq) {
    for (int64_t i = 0; i < 8; ++i) {
      const auto moved = [&](double by) {
        Loss shifted(p);
        for (int64_t head = 0; head < 4; ++head) {
          shifted.gate[static_cast<size_t>((seq * 4 + head) * 8 + i)] += by;
        }
        return shifted();
      };
      double sum = 0.0;
      for (int64_t head = 0; head < 4; ++head) sum += got.dgate.Get((seq * 4 + head) * 8 + i);
      EXPECT_NEAR(sum, (moved(step) - moved(-step)) / (2.0 * step), 5e-6);
    }
  }
}

}  // namespace
}  // namespace gdn::kernels
