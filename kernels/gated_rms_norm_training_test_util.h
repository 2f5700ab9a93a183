// What the tests of the gated RMSNorm for training share: strided views with poison between their
// elements, guarded outputs, and the formulas in FP64 without any rounding.
#ifndef KERNELS_GATED_RMS_NORM_TRAINING_TEST_UTIL_H_
#define KERNELS_GATED_RMS_NORM_TRAINING_TEST_UTIL_H_

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "gdn/kernels/gated_rms_norm_training.h"
#include "gtest/gtest.h"
#include "kernels/linear_test_util.h"
#include "kernels/op_call_test_util.h"

namespace gdn::kernels {

enum class Layout {
  kDense,
  kSeqFirstSlice,         // columns of a projection [seq, batch, width]
  kBatchFirstSlice,       // columns of a projection [batch, seq, width]
  kAlignedSeqFirstSlice,  // the same with every row on 16 bytes if dim is a multiple of 8
  kAlignedSlice,
  kEightByteSlice,  // rows of a 16-bit type on 8 bytes
  kElementStride2,
  kHeadStride2,
  kOffset17,  // dense, but not aligned to more than the element
  kBroadcastHeads,
  kBroadcastSeq,
  kBroadcastAll,
};
inline constexpr Layout kLayouts[] = {Layout::kDense,           Layout::kSeqFirstSlice,
                                      Layout::kBatchFirstSlice, Layout::kAlignedSeqFirstSlice,
                                      Layout::kAlignedSlice,    Layout::kEightByteSlice,
                                      Layout::kElementStride2,  Layout::kHeadStride2,
                                      Layout::kOffset17};
inline constexpr Layout kGateLayouts[] = {Layout::kBroadcastHeads, Layout::kBroadcastSeq,
                                          Layout::kBroadcastAll};

struct Shape {
  int64_t batch = 2, seq = 3, heads = 2, dim = 32;
  int64_t rows() const { return batch * seq * heads; }
  int64_t count() const { return rows() * dim; }
};

// A [batch, seq, heads, dim] view; what lies between its elements is NaN.
struct View {
  Tensor storage;
  int64_t offset = 0;
  gdn_row_strides strides{};

  View() = default;
  View(gdn_dtype dtype, const Shape& s, Layout layout) {
    const int64_t row = s.heads * s.dim;
    const int64_t width = row + 41;
    const int64_t aligned_width = row + 48;
    strides = {s.seq * row, row, s.dim, 1};
    switch (layout) {
      case Layout::kDense:
        break;
      case Layout::kSeqFirstSlice:
        strides = {width, s.batch * width, s.dim, 1};
        offset = 23;
        break;
      case Layout::kBatchFirstSlice:
        strides = {s.seq * width, width, s.dim, 1};
        offset = 24;
        break;
      case Layout::kAlignedSeqFirstSlice:
        strides = {aligned_width, s.batch * aligned_width, s.dim, 1};
        offset = 40;
        break;
      case Layout::kAlignedSlice:
        strides = {s.seq * aligned_width, aligned_width, s.dim, 1};
        offset = 24;
        break;
      case Layout::kEightByteSlice:
        strides = {s.seq * (row + 44), row + 44, s.dim, 1};
        offset = 20;
        break;
      case Layout::kElementStride2:
        strides = {2 * s.seq * row, 2 * row, 2 * s.dim, 2};
        break;
      case Layout::kHeadStride2:
        strides = {2 * s.seq * row, 2 * row, 2 * s.dim, 1};
        break;
      case Layout::kOffset17:
        offset = 17;
        break;
      case Layout::kBroadcastHeads:
        strides = {s.seq * s.dim, s.dim, 0, 1};
        break;
      case Layout::kBroadcastSeq:
        strides = {row, 0, s.dim, 1};
        break;
      case Layout::kBroadcastAll:
        strides = {0, 0, 0, 0};
        break;
    }
    storage = Tensor(dtype, offset + 1 + (s.batch - 1) * strides.batch + (s.seq - 1) * strides.seq +
                                (s.heads - 1) * strides.head + (s.dim - 1) * strides.element);
  }
  const void* data() const {
    return static_cast<const uint8_t*>(storage.data()) + offset * SizeOf(storage.dtype());
  }
  int64_t At(const Shape& s, int64_t row, int64_t i) const {
    return offset + row / s.heads / s.seq * strides.batch + row / s.heads % s.seq * strides.seq +
           row % s.heads * strides.head + i * strides.element;
  }
  float Get(const Shape& s, int64_t row, int64_t i) const { return storage.Get(At(s, row, i)); }
  template <typename Value>
  void Fill(const Shape& s, Value value) {
    for (int64_t row = 0; row < s.rows(); ++row) {
      for (int64_t i = 0; i < s.dim; ++i) storage.Set(At(s, row, i), value());
    }
  }
};

// Guard elements: with the first the output lies on 16 bytes, with the other on its element only.
inline constexpr int64_t kAlignedGuard = 8;
inline constexpr int64_t kOddGuard = 5;

// An output between guard elements.
class Guarded {
 public:
  Guarded() = default;
  Guarded(gdn_dtype dtype, int64_t size, int64_t guard = kAlignedGuard)
      : tensor_(dtype, size + 2 * guard), size_(size), guard_(guard) {}
  void* data() { return static_cast<uint8_t*>(tensor_.data()) + guard_ * SizeOf(tensor_.dtype()); }
  const void* data() const { return const_cast<Guarded*>(this)->data(); }
  float Get(int64_t i) const { return tensor_.Get(guard_ + i); }
  void Set(int64_t i, float value) { tensor_.Set(guard_ + i, value); }
  int64_t size() const { return size_; }
  gdn_dtype dtype() const { return tensor_.dtype(); }
  std::vector<uint8_t> bytes() const { return tensor_.Slice(guard_, guard_ + size_); }
  Tensor& tensor() { return tensor_; }
  void ExpectGuards(const char* name) const {
    for (int64_t i = 0; i < guard_; ++i) {
      EXPECT_TRUE(IsPoison(tensor_, i) && IsPoison(tensor_, guard_ + size_ + i)) << name;
    }
  }

 private:
  Tensor tensor_;
  int64_t size_ = 0;
  int64_t guard_ = kAlignedGuard;
};
inline HostRange Out(Guarded& output) { return Out(output.tensor()); }

struct Problem {
  Shape shape;
  gdn_dtype x_dtype = GDN_BF16;
  gdn_dtype gate_dtype = GDN_BF16;
  gdn_dtype gamma_dtype = GDN_F32;
  bool zero_centered = false;
  gdn_gate_activation activation = GDN_GATE_SILU;
  float eps = 1e-6f;
  Layout x_layout = Layout::kDense;
  Layout gate_layout = Layout::kDense;
  Layout dy_layout = Layout::kDense;
  int64_t guard = kAlignedGuard;
  View x, gate, dy;
  Tensor gamma;

  void Fill(Random& random, float x_scale = 1.0f, float gate_scale = 2.0f) {
    x = View(x_dtype, shape, x_layout);
    gate = View(gate_dtype, shape, gate_layout);
    dy = View(x_dtype, shape, dy_layout);
    x.Fill(shape, [&] { return x_scale * random.Normal(); });
    gate.Fill(shape, [&] { return gate_scale * random.Normal(); });
    dy.Fill(shape, [&] { return random.Normal(); });
    gamma = Tensor(gamma_dtype, shape.dim);
    for (int64_t i = 0; i < shape.dim; ++i) gamma.Set(i, random.Uniform(-1.0f, 2.0f));
  }
  gdn_gated_rms_norm_input Input() const {
    return {shape.batch,  shape.seq,   shape.heads,           shape.dim,  x.data(),
            x_dtype,      x.strides,   gate.data(),           gate_dtype, gate.strides,
            gamma.data(), gamma_dtype, zero_centered ? 1 : 0, activation};
  }
  double Weight(int64_t i) const { return gamma.Get(i) + (zero_centered ? 1.0 : 0.0); }
};

struct Results {
  Guarded y, rstd, dx, dgate, dgamma;
};

inline gdn_gated_rms_norm_forward_args ForwardArgs(const Problem& p, Results& r) {
  gdn_gated_rms_norm_forward_args args{};
  args.in = p.Input();
  args.eps = p.eps;
  r.y = Guarded(p.x_dtype, p.shape.count(), p.guard);
  r.rstd = Guarded(GDN_F32, p.shape.rows(), p.guard);
  args.y = r.y.data();
  args.rstd = static_cast<float*>(r.rstd.data());
  return args;
}

inline gdn_gated_rms_norm_backward_args BackwardArgs(const Problem& p, Results& r) {
  gdn_gated_rms_norm_backward_args args{};
  args.in = p.Input();
  args.rstd = static_cast<const float*>(r.rstd.data());
  args.dy = p.dy.data();
  args.dy_strides = p.dy.strides;
  r.dx = Guarded(p.x_dtype, p.shape.count(), p.guard);
  r.dgate = Guarded(p.gate_dtype, p.shape.count(), p.guard);
  r.dgamma = Guarded(p.gamma_dtype, p.shape.dim, p.guard);
  args.dx = r.dx.data();
  args.dgate = r.dgate.data();
  args.dgamma = r.dgamma.data();
  return args;
}

// The calls of a problem; `more` holds what the arguments point to beyond problem and results.
inline gdn_status Forward(const Execution& execution, const Problem& p, Results& r,
                          gdn_gated_rms_norm_forward_args& args,
                          const std::vector<HostRange>& more = {}) {
  std::vector<HostRange> ranges = {In(p.x.storage), In(p.gate.storage), In(p.gamma), Out(r.y),
                                   Out(r.rstd)};
  ranges.insert(ranges.end(), more.begin(), more.end());
  return CallOp(execution, gdn_gated_rms_norm_forward, args, ranges,
                {args.in.x, args.in.gate, args.in.gamma, args.y, args.rstd, args.fp8_scale,
                 args.fp8_scale_inv, args.amax});
}
inline gdn_status Backward(const Execution& execution, const Problem& p, Results& r,
                           gdn_gated_rms_norm_backward_args& args) {
  return CallOp(execution, gdn_gated_rms_norm_backward, args,
                {In(p.x.storage), In(p.gate.storage), In(p.dy.storage), In(p.gamma),
                 In(r.rstd.tensor()), Out(r.dx), Out(r.dgate), Out(r.dgamma)},
                {args.in.x, args.in.gate, args.in.gamma, args.rstd, args.dy, args.dx, args.dgate,
                 args.dgamma});
}

inline void RunForward(const Execution& execution, const Problem& p, Results& r) {
  gdn_gated_rms_norm_forward_args args = ForwardArgs(p, r);
  ASSERT_EQ(Forward(execution, p, r, args), GDN_OK) << gdn_last_error();
  r.y.ExpectGuards("y");
  r.rstd.ExpectGuards("rstd");
}

inline void RunBackward(Execution& execution, const Problem& p, Results& r) {
  gdn_gated_rms_norm_backward_args args = BackwardArgs(p, r);
  size_t bytes = 0;
  ASSERT_EQ(gdn_gated_rms_norm_backward_workspace(execution.exec(), &args, &bytes), GDN_OK);
  execution.SetWorkspace(bytes);
  ASSERT_EQ(Backward(execution, p, r, args), GDN_OK) << gdn_last_error();
  r.dx.ExpectGuards("dx");
  r.dgate.ExpectGuards("dgate");
  r.dgamma.ExpectGuards("dgamma");
}

inline Results RunBoth(const Backend& backend, const Problem& p) {
  Execution execution(backend);
  Results r;
  RunForward(execution, p, r);
  RunBackward(execution, p, r);
  return r;
}

inline double Rounded(gdn_dtype dtype, double value) {
  Tensor one(dtype, 1);
  one.Set(0, static_cast<float>(value));
  return one.Get(0);
}

inline double Sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }
inline double Act(const Problem& p, double gate) {
  return p.activation == GDN_GATE_SILU ? gate * Sigmoid(gate) : Sigmoid(gate);
}
inline double ActDerivative(const Problem& p, double gate) {
  const double s = Sigmoid(gate);
  return p.activation == GDN_GATE_SILU ? s * (1.0 + gate * Sigmoid(-gate)) : s * Sigmoid(-gate);
}
inline double InverseRmsOf(const Problem& p, int64_t row) {
  double sum = 0.0;
  for (int64_t i = 0; i < p.shape.dim; ++i) sum += std::pow(p.x.Get(p.shape, row, i), 2);
  return 1.0 / std::sqrt(sum / static_cast<double>(p.shape.dim) + p.eps);
}

inline double ErrorOf(const Guarded& got, const Guarded& expected) {
  RelativeL2 error;
  for (int64_t i = 0; i < got.size(); ++i) error.Add(got.Get(i), expected.Get(i));
  return error.value();
}
inline double ErrorOf(const Guarded& got, const std::vector<double>& expected) {
  RelativeL2 error;
  for (int64_t i = 0; i < got.size(); ++i) error.Add(got.Get(i), expected[static_cast<size_t>(i)]);
  return error.value();
}

// How many representable values of the type lie between two, both finite.
inline int64_t UlpsApart(gdn_dtype dtype, float a, float b) {
  const auto ordered = [dtype](float value) -> int64_t {
    int64_t magnitude = 0;
    if (dtype == GDN_F32) {
      magnitude = std::bit_cast<uint32_t>(std::fabs(value));
    } else {
      magnitude = dtype == GDN_BF16 ? F32ToBf16(std::fabs(value)) : F32ToF16(std::fabs(value));
    }
    return std::signbit(value) ? -magnitude : magnitude;
  };
  return std::abs(ordered(a) - ordered(b));
}

struct UlpCounts {
  int64_t one = 0;   // elements one representable value apart
  int64_t more = 0;  // elements further apart, or not finite
};
inline UlpCounts CountUlps(const Guarded& got, const Guarded& expected) {
  UlpCounts counts;
  for (int64_t i = 0; i < got.size(); ++i) {
    if (!std::isfinite(got.Get(i))) {
      ++counts.more;
      continue;
    }
    const int64_t apart = UlpsApart(got.dtype(), got.Get(i), expected.Get(i));
    counts.one += apart == 1;
    counts.more += apart > 1;
  }
  return counts;
}

}  // namespace gdn::kernels

#endif  // KERNELS_GATED_RMS_NORM_TRAINING_TEST_UTIL_H_
