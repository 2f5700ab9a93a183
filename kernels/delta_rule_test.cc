// The delta rule's values: REF against an oracle written here, every back end against REF.
#include "gdn/kernels/delta_rule.h"

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/delta_rule_test_util.h"

namespace gdn::kernels {
namespace {

// The rule in the paper's form, S <- S (a (I - b k k^T)) + b v k^T, on full matrices.
void Oracle(const DeltaCall& call, int64_t sequence, int64_t hv, std::vector<double>& S,
            std::vector<double>& o) {
  const int64_t K = call.shape.key_dim;
  const int64_t V = call.shape.value_dim;
  const int64_t h = hv / call.shape.ratio;
  for (int64_t t = call.cu_seqlens[sequence]; t < call.cu_seqlens[sequence + 1]; ++t) {
    std::vector<double> q(K), k(K);
    double qq = 0, kk = 0;
    for (int64_t i = 0; i < K; ++i) {
      q[i] = call.q.Get(t * call.key_stride() + h * K + i);
      k[i] = call.k.Get(t * call.key_stride() + h * K + i);
      qq += q[i] * q[i];
      kk += k[i] * k[i];
    }
    const double scale =
        call.shape.scale != 0 ? double{call.shape.scale} : std::pow(double(K), -0.5);
    for (int64_t i = 0; i < K; ++i) {
      if (call.shape.normalize) q[i] /= std::sqrt(qq + 1e-6), k[i] /= std::sqrt(kk + 1e-6);
      q[i] *= scale;
    }
    const double a = std::exp(double{call.g[t * call.value_heads() + hv]});
    const double b = call.beta[t * call.value_heads() + hv];
    std::vector<double> transition(K * K);
    for (int64_t i = 0; i < K; ++i) {
      for (int64_t j = 0; j < K; ++j) transition[i * K + j] = a * ((i == j) - b * k[i] * k[j]);
    }
    std::vector<double> next(V * K);
    for (int64_t v = 0; v < V; ++v) {
      for (int64_t j = 0; j < K; ++j) {
        double sum = b * double{call.v.Get(t * call.value_stride() + hv * V + v)} * k[j];
        for (int64_t i = 0; i < K; ++i) sum += S[v * K + i] * transition[i * K + j];
        next[v * K + j] = sum;
      }
    }
    S = next;
    for (int64_t v = 0; v < V; ++v) {
      double sum = 0;
      for (int64_t i = 0; i < K; ++i) sum += S[v * K + i] * q[i];
      o.push_back(sum);
    }
  }
}

TEST(DeltaRule, RefMatchesTheTransitionMatrixForm) {
  for (float max_beta : {1.0f, 2.0f}) {
    for (float scale : {0.0f, 1.0f, 0.1f}) {
      DeltaShape shape;
      shape.lengths = {7, 1, 20};
      shape.key_dim = 12;
      shape.value_dim = 9;
      shape.ratio = 3;
      shape.scale = scale;
      shape.max_beta = max_beta;
      shape.normalize = scale != 1.0f;
      const DeltaCall before(shape, 5);
      const DeltaCall after = RunDelta(DeltaOp::kPrefill, kRef, before);
      RelativeL2 o_error, s_error;
      for (int64_t n = 0; n < 3; ++n) {
        for (int64_t hv = 0; hv < before.value_heads(); ++hv) {
          const int64_t slot = before.read[n] * before.slot_stride() + hv * before.head_size();
          std::vector<double> S, o;
          for (int64_t i = 0; i < before.head_size(); ++i) S.push_back(before.state.Get(slot + i));
          Oracle(before, n, hv, S, o);
          for (int64_t i = 0; i < before.head_size(); ++i)
            s_error.Add(after.state.Get(slot + i), S[i]);
          for (int64_t t = 0; t < shape.lengths[n]; ++t) {
            for (int64_t v = 0; v < 9; ++v) {
              const int64_t at = (before.cu_seqlens[n] + t) * before.value_stride() + hv * 9 + v;
              o_error.Add(after.o.Get(at), o[t * 9 + v]);
            }
          }
        }
      }
      EXPECT_LE(o_error.value(), 1e-7);
      EXPECT_LE(s_error.value(), 1e-7);
    }
  }
}

void ExpectMatchesRef(DeltaOp op, const DeltaShape& shape, const std::string& what) {
  DeltaCall before(shape, 11);
  // The second sequence is fresh: its slot holds NaN, which must not be read.
  if (before.read.size() > 1) {
    before.fresh[1] = 1;
    for (int64_t i = 0; i < before.value_heads() * before.head_size(); ++i) {
      before.state.Set(before.read[1] * before.slot_stride() + i, NAN);
    }
  }
  const DeltaCall expected = RunDelta(op, kRef, before);
  for (const Backend& backend : BackendsUnderTest()) {
    const DeltaCall got = RunDelta(op, backend, before);
    const double o_bound = 2.0 * RoundingBound(shape.o);
    const double s_bound = 2.0 * RoundingBound(shape.state);
    EXPECT_LE(OutputError(got, expected), o_bound) << backend.name << ": " << what;
    EXPECT_LE(StateError(got, expected), s_bound) << backend.name << ": " << what;
    ExpectRestUntouched(got, before);
  }
}

TEST(DeltaRule, StepMatchesRefInEveryType) {
  for (gdn_dtype qkv : {GDN_F32, GDN_BF16, GDN_F16}) {
    for (gdn_dtype o : {GDN_F32, GDN_BF16, GDN_F16}) {
      for (gdn_dtype state : {GDN_F32, GDN_BF16}) {
        DeltaShape shape;
        shape.lengths = {1, 1, 1};
        shape.qkv = qkv;
        shape.o = o;
        shape.state = state;
        shape.stride_pad = 8;
        ExpectMatchesRef(DeltaOp::kStep, shape, std::to_string(qkv) + std::to_string(o));
      }
    }
  }
}

TEST(DeltaRule, PrefillMatchesRefInEveryType) {
  for (gdn_dtype qkv : {GDN_F32, GDN_BF16, GDN_F16}) {
    for (gdn_dtype o : {GDN_F32, GDN_BF16, GDN_F16}) {
      for (gdn_dtype state : {GDN_F32, GDN_BF16}) {
        DeltaShape shape;
        shape.lengths = {5, 37, 64, 0, 3};
        shape.key_dim = 64;
        shape.value_dim = 64;
        shape.qkv = qkv;
        shape.o = o;
        shape.state = state;
        shape.stride_pad = 3;
        shape.trailing_tokens = 4;
        ExpectMatchesRef(DeltaOp::kPrefill, shape, std::to_string(qkv) + std::to_string(o));
      }
    }
  }
}

TEST(DeltaRule, MatchesRefInEveryHeadSize) {
  std::vector<std::pair<int64_t, int64_t>> sizes = {{1, 1},     {96, 96},   {128, 128},
                                                    {192, 192}, {255, 511}, {256, 512}};
  for (int64_t key_dim : {1, 2, 7, 8, 16, 31, 60, 72, 96, 100, 128, 192, 255, 256}) {
    sizes.emplace_back(key_dim, 60);
  }
  for (int64_t value_dim : {1, 2, 3, 24, 47, 48, 49, 64, 100, 128, 256, 512}) {
    sizes.emplace_back(64, value_dim);
    sizes.emplace_back(36, value_dim);
  }
  for (const auto& [key_dim, value_dim] : sizes) {
    for (gdn_dtype state : {GDN_F32, GDN_BF16}) {
      DeltaShape shape;
      shape.key_heads = 1;
      shape.ratio = 1;
      shape.key_dim = key_dim;
      shape.value_dim = value_dim;
      shape.state = state;
      const std::string what = std::to_string(key_dim) + " x " + std::to_string(value_dim);
      shape.lengths = {1, 1};
      ExpectMatchesRef(DeltaOp::kStep, shape, "step " + what);
      shape.lengths = {6, 19};
      ExpectMatchesRef(DeltaOp::kPrefill, shape, "prefill " + what);
    }
  }
}

TEST(DeltaRule, MatchesRefInEveryHeadRatio) {
  for (int64_t ratio = 1; ratio <= 8; ++ratio) {
    DeltaShape shape;
    shape.key_heads = 3;
    shape.ratio = ratio;
    shape.key_dim = 32;
    shape.value_dim = 24;
    shape.lengths = {1, 1};
    ExpectMatchesRef(DeltaOp::kStep, shape, "step, ratio " + std::to_string(ratio));
    shape.lengths = std::vector<int32_t>(6, 20);  // enough tasks to group the value heads
    ExpectMatchesRef(DeltaOp::kPrefill, shape, "prefill, ratio " + std::to_string(ratio));
  }
}

TEST(DeltaRule, PrefillMatchesRefInEveryLength) {
  for (int32_t length = 1; length <= 100; ++length) {
    DeltaShape shape;
    shape.key_heads = 1;
    shape.key_dim = 32;
    shape.value_dim = 28;
    shape.lengths = {length, length};
    ExpectMatchesRef(DeltaOp::kPrefill, shape, "length " + std::to_string(length));
  }
}

TEST(DeltaRule, MatchesRefFromWeakToStrongDecay) {
  for (float decay : {0.0f, 1e-4f, 0.01f, 1.0f, 10.0f, 1000.0f}) {
    for (float max_beta : {1.0f, 2.0f}) {
      DeltaShape shape;
      shape.lengths = {130, 63, 64, 65};
      shape.key_dim = 64;
      shape.value_dim = 60;
      shape.mean_decay = decay;
      shape.max_beta = max_beta;
      ExpectMatchesRef(DeltaOp::kPrefill, shape, "decay " + std::to_string(decay));
    }
  }
}

// Weak decay behind a very strong one: differences of running sums would lose the weak part.
TEST(DeltaRule, KeepsWeakDecayBehindStrongDecay) {
  DeltaShape shape;
  shape.lengths = {70};
  shape.key_heads = 1;
  DeltaCall before(shape, 3);
  for (size_t i = 0; i < before.g.size(); ++i) {
    const size_t token = i / 2;
    before.g[i] = token % 16 == 3 ? -1000.0f : token % 2 == 0 ? 0.0f : -0.01f;
  }
  const DeltaCall expected = RunDelta(DeltaOp::kPrefill, kRef, before);
  for (const Backend& backend : BackendsUnderTest()) {
    const DeltaCall got = RunDelta(DeltaOp::kPrefill, backend, before);
    EXPECT_LE(OutputError(got, expected), 3e-6) << backend.name;
    EXPECT_LE(StateError(got, expected), 3e-6) << backend.name;
  }
}

TEST(DeltaRule, ZeroAndTinyKeysStayFinite) {
  for (float size : {0.0f, 1e-6f, 1e-4f}) {
    DeltaShape shape;
    shape.lengths = {5, 40};
    shape.key_dim = 64;
    shape.value_dim = 32;
    DeltaCall before(shape, 9);
    for (int64_t i = 0; i < before.q.size(); ++i) {
      before.q.Set(i, size * before.q.Get(i));
      before.k.Set(i, size * before.k.Get(i));
    }
    const DeltaCall expected = RunDelta(DeltaOp::kPrefill, kRef, before);
    for (const Backend& backend : BackendsUnderTest()) {
      const DeltaCall got = RunDelta(DeltaOp::kPrefill, backend, before);
      EXPECT_LE(OutputError(got, expected), 4e-6) << backend.name << " " << size;
      EXPECT_LE(StateError(got, expected), 4e-6) << backend.name << " " << size;
      for (int64_t i = 0; size == 0.0f && i < got.o.size(); ++i) ASSERT_EQ(got.o.Get(i), 0.0f);
    }
  }
}

}  // namespace
}  // namespace gdn::kernels
