#include "gdn/kernels/gated_rms_norm_training.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>

#include "gdn/kernels/cpu_pool.h"
#include "kernels/common/fp8.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/gated_rms_norm_training.cc"
#include "hwy/foreach_target.h"
// After foreach_target.h.
#include "hwy/highway.h"
#include "kernels/cpu/dense_vec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace gdn::cpu::HWY_NAMESPACE {

constexpr int64_t kMaxDim = 8192;

using GatedInput = gdn_gated_rms_norm_input;

struct DenseRow {
  const void* data;
  gdn_dtype dtype;
  int64_t offset;
};

// Row `row` of a view; gathered into `buffer` unless its elements are neighbours already.
inline DenseRow RowOf(const GatedInput& in, const void* data, gdn_dtype dtype,
                      const gdn_row_strides& strides, int64_t row, float* buffer) {
  const int64_t head = row % in.heads;
  const int64_t seq = row / in.heads % in.seq;
  const int64_t batch = row / in.heads / in.seq;
  const int64_t offset = batch * strides.batch + seq * strides.seq + head * strides.head;
  if (strides.element == 1 || in.dim == 1) return {data, dtype, offset};
  for (int64_t i = 0; i < in.dim; ++i) {
    buffer[i] = kernels::Load(data, dtype, offset + i * strides.element);
  }
  return {buffer, GDN_F32, 0};
}

HWY_INLINE F32Vec LoadRow(F32 d, const DenseRow& row, int64_t i, int64_t count) {
  return LoadVec(d, row.data, row.dtype, row.offset + i, count);
}

HWY_INLINE F32Vec WeightOf(F32 d, const GatedInput& in, int64_t i, int64_t count) {
  const auto offset = hn::Set(d, in.zero_centered_gamma ? 1.0f : 0.0f);
  return hn::Add(LoadVec(d, in.gamma, in.gamma_dtype, i, count), offset);
}

// SiluOf keeps a floor of 1e-38 under its exponential, which a gate below -1e30 would multiply up
// to where it shows; below -1e4 the result is as good as zero. A NaN fails the comparison and
// stays.
HWY_INLINE F32Vec ActOf(F32 d, const GatedInput& in, F32Vec gate) {
  if (in.activation == GDN_GATE_SIGMOID) return SigmoidOf(d, gate);
  const auto least = hn::Set(d, -1e4f);
  return SiluOf(d, hn::IfThenElse(hn::Lt(gate, least), least, gate));
}

// 1 - sigmoid(gate) as sigmoid(-gate), which does not cancel.
HWY_INLINE F32Vec DerivativeOf(F32 d, const GatedInput& in, F32Vec gate) {
  const auto sigmoid = SigmoidOf(d, gate);
  const auto complement = SigmoidOf(d, hn::Neg(gate));
  if (in.activation == GDN_GATE_SIGMOID) return hn::Mul(sigmoid, complement);
  return hn::Mul(sigmoid, hn::MulAdd(gate, complement, hn::Set(d, 1.0f)));
}

// The larger magnitude in each lane, as bits: these order like the values, NaN above all.
HWY_INLINE F32Vec LargerMagnitude(F32 d, F32Vec a, F32Vec b) {
  const hn::Rebind<int32_t, F32> di;
  return hn::BitCast(d, hn::Max(hn::BitCast(di, hn::Abs(a)), hn::BitCast(di, b)));
}

// Returns the bits of the largest |y| of the rows.
uint32_t GatedForwardRows(const gdn_gated_rms_norm_forward_args& args, int64_t begin, int64_t end) {
  const F32 d;
  const GatedInput& in = args.in;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  float x_buffer[kMaxDim];
  float gate_buffer[kMaxDim];
  float y_buffer[kMaxDim];
  uint32_t amax = 0;
  for (int64_t row = begin; row < end; ++row) {
    const DenseRow x_row = RowOf(in, in.x, in.x_dtype, in.x_strides, row, x_buffer);
    const DenseRow gate_row = RowOf(in, in.gate, in.gate_dtype, in.gate_strides, row, gate_buffer);
    float rstd = InverseRms(d, x_row.data, x_row.dtype, x_row.offset, in.dim, args.eps);
    if (std::isinf(rstd)) rstd = 0.0f;
    if (args.rstd != nullptr) args.rstd[row] = rstd;
    const auto factor = hn::Set(d, rstd);
    auto largest = hn::Zero(d);
    const int64_t y0 = row * in.dim;
    for (int64_t i = 0; i < in.dim; i += lanes) {
      const int64_t rest = in.dim - i;
      const auto x_hat = hn::Mul(LoadRow(d, x_row, i, rest), factor);
      const auto n = RoundTo(d, hn::Mul(x_hat, WeightOf(d, in, i, rest)), in.x_dtype);
      const auto y =
          RoundTo(d, hn::Mul(n, ActOf(d, in, LoadRow(d, gate_row, i, rest))), in.x_dtype);
      // The lanes beyond the row hold zeros times act(0): no magnitude.
      largest = LargerMagnitude(d, y, largest);
      if (args.fp8 == GDN_FP8_NONE) {
        StoreVec(d, y, args.y, in.x_dtype, y0 + i, rest);
      } else {
        StoreVec(d, y, y_buffer, GDN_F32, i, rest);
      }
    }
    alignas(64) uint32_t magnitudes[hn::MaxLanes(F32())];
    hn::Store(hn::BitCast(hn::Rebind<uint32_t, F32>(), largest), hn::Rebind<uint32_t, F32>(),
              magnitudes);
    const uint32_t row_amax = *std::max_element(magnitudes, magnitudes + lanes);
    amax = std::max(amax, row_amax);
    if (args.fp8 == GDN_FP8_NONE) continue;
    float scale = 0.0f;
    if (args.fp8 == GDN_FP8_ROW) {
      const auto value = std::bit_cast<float>(row_amax);
      const float floored = value < 0x1p-117f ? 0x1p-117f : value;
      scale = kernels::kE4m3Max / floored;
      args.fp8_scale_inv[row] = floored / kernels::kE4m3Max;
    } else {
      scale = *args.fp8_scale;
    }
    auto* out = static_cast<uint8_t*>(args.y) + y0;
    for (int64_t i = 0; i < in.dim; ++i) out[i] = kernels::F32ToE4m3(y_buffer[i] * scale);
  }
  return amax;
}

// dx and dgate of rows [begin, end), and their share of dgamma, which is overwritten.
void GatedBackwardRows(const gdn_gated_rms_norm_backward_args& args, int64_t begin, int64_t end,
                       float* dgamma) {
  const F32 d;
  const GatedInput& in = args.in;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  float x_buffer[kMaxDim];
  float gate_buffer[kMaxDim];
  float dy_buffer[kMaxDim];
  float product[kMaxDim];  // dn * w
  std::fill_n(dgamma, in.dim, 0.0f);
  for (int64_t row = begin; row < end; ++row) {
    const DenseRow x_row = RowOf(in, in.x, in.x_dtype, in.x_strides, row, x_buffer);
    const DenseRow gate_row = RowOf(in, in.gate, in.gate_dtype, in.gate_strides, row, gate_buffer);
    const DenseRow dy_row = RowOf(in, args.dy, in.x_dtype, args.dy_strides, row, dy_buffer);
    const auto rstd = hn::Set(d, args.rstd[row]);
    const int64_t out = row * in.dim;
    auto sum = hn::Zero(d);
    for (int64_t i = 0; i < in.dim; i += lanes) {
      const int64_t rest = in.dim - i;
      const auto dy = LoadRow(d, dy_row, i, rest);
      const auto gate = LoadRow(d, gate_row, i, rest);
      const auto weight = WeightOf(d, in, i, rest);
      const auto x_hat = hn::Mul(LoadRow(d, x_row, i, rest), rstd);
      const auto n = RoundTo(d, hn::Mul(x_hat, weight), in.x_dtype);
      StoreVec(d, hn::Mul(hn::Mul(dy, n), DerivativeOf(d, in, gate)), args.dgate, in.gate_dtype,
               out + i, rest);
      const auto dn = RoundTo(d, hn::Mul(dy, ActOf(d, in, gate)), in.x_dtype);
      const auto share = LoadVec(d, dgamma, GDN_F32, i, rest);
      StoreVec(d, hn::MulAdd(dn, x_hat, share), dgamma, GDN_F32, i, rest);
      const auto weighted = hn::Mul(dn, weight);
      StoreVec(d, weighted, product, GDN_F32, i, rest);
      sum = hn::MulAdd(weighted, x_hat, sum);
    }
    const float mean = hn::GetLane(hn::SumOfLanes(d, sum)) / static_cast<float>(in.dim);
    const auto c = hn::Set(d, mean);
    for (int64_t i = 0; i < in.dim; i += lanes) {
      const int64_t rest = in.dim - i;
      const auto x_hat = hn::Mul(LoadRow(d, x_row, i, rest), rstd);
      const auto weighted = LoadVec(d, product, GDN_F32, i, rest);
      StoreVec(d, hn::Mul(rstd, hn::NegMulAdd(x_hat, c, weighted)), args.dx, in.x_dtype, out + i,
               rest);
    }
  }
}

}  // namespace gdn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace gdn::cpu {
namespace {

// Partial rows of dgamma: a function of the row count alone, so that no thread count moves a bit.
constexpr int64_t kRowsPerPartial = 8;
constexpr int64_t kMaxPartials = 256;

int64_t Rows(const gdn_gated_rms_norm_input& in) { return in.batch * in.seq * in.heads; }

int64_t Partials(int64_t rows) {
  return std::min(kMaxPartials, (rows + kRowsPerPartial - 1) / kRowsPerPartial);
}

}  // namespace

HWY_EXPORT(GatedForwardRows);
HWY_EXPORT(GatedBackwardRows);

gdn_status GatedRmsNormForward(const gdn_exec& exec, const gdn_gated_rms_norm_forward_args& args) {
  constexpr int64_t kGrainElements = 2048;
  const auto run = HWY_DYNAMIC_DISPATCH(GatedForwardRows);
  std::atomic<uint32_t> amax{0};
  ParallelFor(exec.pool, Rows(args.in), std::max<int64_t>(1, kGrainElements / args.in.dim),
              [&](int64_t begin, int64_t end, int32_t) {
                const uint32_t part = run(args, begin, end);
                uint32_t seen = amax.load(std::memory_order_relaxed);
                while (seen < part && !amax.compare_exchange_weak(seen, part)) {
                }
              });
  if (args.amax != nullptr) *args.amax = std::bit_cast<float>(amax.load());
  if (args.fp8 == GDN_FP8_STATIC && args.fp8_scale_inv != nullptr) {
    *args.fp8_scale_inv = 1.0f / *args.fp8_scale;
  }
  return GDN_OK;
}

size_t GatedRmsNormBackwardWorkspace(const gdn_gated_rms_norm_backward_args& args) {
  return static_cast<size_t>(Partials(Rows(args.in)) * args.in.dim) * sizeof(float);
}

gdn_status GatedRmsNormBackward(const gdn_exec& exec,
                                const gdn_gated_rms_norm_backward_args& args) {
  const auto run = HWY_DYNAMIC_DISPATCH(GatedBackwardRows);
  const int64_t rows = Rows(args.in);
  const int64_t partials = Partials(rows);
  const int64_t dim = args.in.dim;
  auto* shares = static_cast<float*>(exec.workspace);
  ParallelFor(exec.pool, partials, 1, [&](int64_t begin, int64_t end, int32_t) {
    for (int64_t p = begin; p < end; ++p) {
      // Quotient and remainder: rows * p could leave 64 bits.
      const int64_t each = rows / partials;
      const int64_t extra = rows % partials;
      const int64_t first = p * each + std::min(p, extra);
      run(args, first, first + each + (p < extra ? 1 : 0), shares + p * dim);
    }
  });
  for (int64_t i = 0; i < dim; ++i) {
    float sum = 0.0f;
    for (int64_t p = 0; p < partials; ++p) sum += shares[p * dim + i];
    kernels::Store(args.dgamma, args.in.gamma_dtype, i, sum);
  }
  return GDN_OK;
}

}  // namespace gdn::cpu
#endif  // HWY_ONCE
