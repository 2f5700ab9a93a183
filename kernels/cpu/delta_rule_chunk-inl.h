// The chunked delta rule for the current Highway target. A state row is a row of every product, so
// the state is used as it lies in its slot, [V][K], and rows are independent of each other.
//
// With G the running sum of g in the chunk, D_ij = exp(G_i - G_j) for j <= i, S the state before:
//   M_ij = beta_i D_ij (k_i.k_j) for j < i,   N = (I + M^T)^-1
//   X = beta (v^T - exp(G) S k),   U = X N
//   o^T = exp(G) S q + U (D (k.q)),   S <- exp(G_end) S + U (D_end k)
// Every exponent is a sum of g over the tokens between j and i: it is <= 0, and no difference of
// two large sums.
#include "hwy/highway.h"
#include "kernels/cpu/activations-inl.h"
#include "kernels/cpu/delta_rule_common.h"
#include "kernels/cpu/delta_rule_scratch.h"
#include "kernels/cpu/delta_rule_step-inl.h"
#include "kernels/cpu/elements-inl.h"
#include "kernels/cpu/tile_product-inl.h"

#if defined(KERNELS_CPU_DELTA_RULE_CHUNK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KERNELS_CPU_DELTA_RULE_CHUNK_INL_H_
#undef KERNELS_CPU_DELTA_RULE_CHUNK_INL_H_
#else
#define KERNELS_CPU_DELTA_RULE_CHUNK_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace gdn::cpu::HWY_NAMESPACE {

inline constexpr int64_t kLanes = hn::MaxLanes(hn::ScalableTag<float>());
inline constexpr int64_t kPanel = kTileVectors * kLanes;

// out[c * out_stride + r] = in[r * in_stride + c] for four rows and `columns` (rounded up to four).
HWY_INLINE void TransposeRows4(const float* in, int64_t in_stride, int64_t columns, float* out,
                               int64_t out_stride) {
  const hn::FixedTag<float, 4> d;
  const hn::FixedTag<double, 2> dw;
  for (int64_t c = 0; c < columns; c += 4) {
    const auto r0 = hn::LoadU(d, in + c);
    const auto r1 = hn::LoadU(d, in + in_stride + c);
    const auto r2 = hn::LoadU(d, in + 2 * in_stride + c);
    const auto r3 = hn::LoadU(d, in + 3 * in_stride + c);
    const auto l01 = hn::BitCast(dw, hn::InterleaveLower(d, r0, r1));
    const auto l23 = hn::BitCast(dw, hn::InterleaveLower(d, r2, r3));
    const auto u01 = hn::BitCast(dw, hn::InterleaveUpper(d, r0, r1));
    const auto u23 = hn::BitCast(dw, hn::InterleaveUpper(d, r2, r3));
    float* to = out + c * out_stride;
    hn::StoreU(hn::BitCast(d, hn::InterleaveLower(dw, l01, l23)), d, to);
    hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(dw, l01, l23)), d, to + out_stride);
    hn::StoreU(hn::BitCast(d, hn::InterleaveLower(dw, u01, u23)), d, to + 2 * out_stride);
    hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(dw, u01, u23)), d, to + 3 * out_stride);
  }
}

// What one chunk is: tokens [begin, begin + count), padded to whole vectors of token columns.
struct Chunk {
  int64_t begin;
  int64_t count;
  int64_t padded;
};

// Keys and queries of one key head: prepared rows, their transpose in panels, their products.
inline void ChunkKeys(const gdn_delta_rule_args& args, const Chunk& chunk, int64_t h,
                      ChunkScratch& scratch) {
  const int64_t dim = args.key_dim;
  const int64_t stride = PaddedKeyDim(args);
  const bool normalize = args.use_qk_l2norm != 0;
  WithElementType(args.qkv_dtype, [&](auto element) HWY_ATTR {
    using T = decltype(element);
    for (int64_t i = 0; i < chunk.count; ++i) {
      const T* q = static_cast<const T*>(args.q) + (chunk.begin + i) * args.q_token_stride;
      const T* k = static_cast<const T*>(args.k) + (chunk.begin + i) * args.k_token_stride;
      const auto size = static_cast<size_t>(dim);
      float* k_row = scratch.k + i * stride;
      float* q_row = scratch.q + i * stride;
      std::fill(k_row + dim / kLanes * kLanes, k_row + stride, 0.0f);
      std::fill(q_row + dim / kLanes * kLanes, q_row + stride, 0.0f);
      PrepareKey(k + h * dim, size, normalize, 1.0f, k_row);
      PrepareKey(q + h * dim, size, normalize, QueryScale(args), q_row);
    }
  });
  std::fill(scratch.k + chunk.count * stride, scratch.k + chunk.padded * stride, 0.0f);
  std::fill(scratch.q + chunk.count * stride, scratch.q + chunk.padded * stride, 0.0f);
  for (int64_t column = 0; column < 2 * chunk.padded; column += 4) {
    const float* rows = column < chunk.padded ? scratch.k + column * stride
                                              : scratch.q + (column - chunk.padded) * stride;
    float* panel = scratch.kq_t + column / kPanel * kPanel * stride + column % kPanel;
    TransposeRows4(rows, stride, RoundUp(dim, 4), panel, kPanel);
  }
  for (int64_t column = 0; column < 2 * chunk.padded; column += kPanel) {
    // Only tokens i >= j are needed; a panel may hold the end of the keys and the first queries.
    const int64_t last = column + kPanel <= chunk.padded ? column + kPanel
                         : column < chunk.padded         ? chunk.count
                                                         : column + kPanel - chunk.padded;
    ForRowBlocks(std::min(last, chunk.count), [&](int64_t row, int64_t rows) HWY_ATTR {
      TileOfRows<kTileVectors>(
          rows,
          {scratch.k + row * stride, stride, scratch.kq_t + column * stride, kPanel, dim, 0.0f,
           nullptr, 0, scratch.gram + row * 2 * chunk.padded + column, 2 * chunk.padded});
    });
  }
}

// Decays, the inverse and the token mixing matrix of one value head.
inline void ChunkGates(const gdn_delta_rule_args& args, const Chunk& chunk, int64_t hv,
                       ChunkScratch& scratch) {
  const hn::ScalableTag<float> d;
  const int64_t padded = chunk.padded;
  float* g = scratch.gates;
  float* beta = g + kChunk;
  float* from_start = beta + kChunk;
  float* beta_from_start = from_start + kChunk;
  float* sums = beta_from_start + kChunk;  // of g over the tokens after j up to i
  for (int64_t i = 0; i < padded; ++i) {
    const int64_t gate = (chunk.begin + i) * args.value_heads + hv;
    g[i] = i < chunk.count ? args.g[gate] : 0.0f;
    beta[i] = i < chunk.count ? args.beta[gate] : 0.0f;
    sums[i] = 0.0f;
  }
  for (int64_t j = chunk.count - 1; j >= 0; --j) {
    const float* gram = scratch.gram + j * 2 * padded;
    float* system = scratch.system + j * padded;
    float* mix = scratch.mix + j * padded;
    float* inverse = scratch.inverse + j * padded;
    const auto next_g = hn::Set(d, j + 1 < chunk.count ? g[j + 1] : 0.0f);
    const auto token = hn::Set(d, static_cast<float>(j));
    for (int64_t i = 0; i < padded; i += kLanes) {
      const auto column = hn::Iota(d, static_cast<float>(i));
      const auto sum =
          hn::Add(hn::Load(d, sums + i), hn::IfThenElseZero(hn::Gt(column, token), next_g));
      hn::Store(sum, d, sums + i);
      const auto factor = ExpOf(d, sum);
      // The products below the diagonal were not formed: masked last, whatever they hold.
      const auto kq = hn::Mul(factor, hn::LoadU(d, gram + padded + i));
      hn::Store(hn::IfThenElseZero(hn::Ge(column, token), kq), d, mix + i);
      const auto kk = hn::Mul(hn::Mul(hn::Load(d, beta + i), factor), hn::LoadU(d, gram + i));
      hn::Store(hn::IfThenElseZero(hn::Gt(column, token), kk), d, system + i);
      hn::Store(hn::IfThenElseZero(hn::Eq(column, token), hn::Set(d, 1.0f)), d, inverse + i);
    }
    // N_j = e_j - sum_{i>j} M^T_ji N_i; row i of N is zero before column i.
    for (int64_t column = j / kLanes * kLanes; column < padded; column += kLanes) {
      auto even = hn::Load(d, inverse + column);
      auto odd = hn::Zero(d);
      const int64_t end = std::min(column + kLanes, chunk.count);
      int64_t i = j + 1;
      for (; i + 1 < end; i += 2) {
        even = hn::NegMulAdd(hn::Set(d, system[i]),
                             hn::Load(d, scratch.inverse + i * padded + column), even);
        odd = hn::NegMulAdd(hn::Set(d, system[i + 1]),
                            hn::Load(d, scratch.inverse + (i + 1) * padded + column), odd);
      }
      if (i < end) {
        even = hn::NegMulAdd(hn::Set(d, system[i]),
                             hn::Load(d, scratch.inverse + i * padded + column), even);
      }
      hn::Store(hn::Add(even, odd), d, inverse + column);
    }
    // The decay from token j to the chunk's end.
    const float to_end = std::exp(sums[chunk.count - 1]);
    const auto scale = hn::Set(d, to_end);
    const int64_t stride = PaddedKeyDim(args);
    for (int64_t i = 0; i < stride; i += kLanes) {
      hn::Store(hn::Mul(scale, hn::Load(d, scratch.k + j * stride + i)), d,
                scratch.decayed_k + j * stride + i);
    }
  }
  for (int64_t i = 0; i < padded; i += kLanes) {
    const auto factor = ExpOf(d, hn::Add(hn::Load(d, sums + i), hn::Set(d, g[0])));
    hn::Store(factor, d, from_start + i);
    hn::Store(hn::Mul(factor, hn::Load(d, beta + i)), d, beta_from_start + i);
  }
}

// Rows [v0, v0 + rows) of one head's state through the chunk. src NULL: a state of zeros.
inline void ChunkRows(const gdn_delta_rule_args& args, const Chunk& chunk, int64_t hv, int64_t v0,
                      int64_t rows, const float* src, float* dst, ChunkScratch& scratch) {
  const hn::ScalableTag<float> d;
  const int64_t padded = chunk.padded;
  const int64_t key_dim = args.key_dim;
  const int64_t stride = PaddedKeyDim(args);
  const float* beta = scratch.gates + kChunk;
  const float* from_start = beta + kChunk;
  const float* beta_from_start = from_start + kChunk;
  const int64_t rows4 = RoundUp(rows, 4);
  const auto row_count = static_cast<size_t>(rows);

  WithElementType(args.qkv_dtype, [&](auto element) HWY_ATTR {
    using T = decltype(element);
    const T* v = static_cast<const T*>(args.v) + hv * args.value_dim + v0;
    for (int64_t i = 0; i < chunk.count; ++i) {
      float* row = scratch.rows + i * kValueBlock;
      CopyToFloat(v + (chunk.begin + i) * args.v_token_stride, row_count, row);
      std::fill(row + rows, row + rows4, 0.0f);
    }
  });
  std::fill(scratch.rows + chunk.count * kValueBlock, scratch.rows + padded * kValueBlock, 0.0f);
  for (int64_t i = 0; i < padded; i += 4) {
    TransposeRows4(scratch.rows + i * kValueBlock, kValueBlock, rows4, scratch.x + i, padded);
  }

  if (src != nullptr) {
    ForRowBlocks(rows, [&](int64_t row, int64_t count) HWY_ATTR {
      for (int64_t column = 0; column < 2 * padded; column += kPanel) {
        TileOfRows<kTileVectors>(
            count, {src + row * stride, stride, scratch.kq_t + column * stride, kPanel, key_dim,
                    0.0f, nullptr, 0, scratch.read + row * 2 * padded + column, 2 * padded});
      }
    });
  }
  for (int64_t row = 0; row < rows; ++row) {
    float* x = scratch.x + row * padded;
    float* read = scratch.read + row * 2 * padded;
    for (int64_t i = 0; i < padded; i += kLanes) {
      auto value = hn::Mul(hn::Load(d, beta + i), hn::LoadU(d, x + i));
      auto output = hn::Zero(d);
      if (src != nullptr) {
        value = hn::NegMulAdd(hn::Load(d, beta_from_start + i), hn::LoadU(d, read + i), value);
        output = hn::Mul(hn::Load(d, from_start + i), hn::LoadU(d, read + padded + i));
      }
      hn::StoreU(value, d, x + i);
      hn::StoreU(output, d, read + padded + i);
    }
  }

  // U = X N and o^T = exp(G) S q + U mix: both matrices are zero below the diagonal.
  ForRowBlocks(rows, [&](int64_t row, int64_t count) HWY_ATTR {
    const auto triangular = [&](const float* a, const float* b, const float* c_in, float* c,
                                int64_t c_stride) HWY_ATTR {
      for (int64_t column = 0; column < padded; column += kPanel) {
        const bool full = column + kPanel <= padded;
        const int64_t depth = std::min(column + kPanel, chunk.count);
        const Product product{a,
                              padded,
                              b + column,
                              padded,
                              depth,
                              1.0f,
                              c_in == nullptr ? nullptr : c_in + column,
                              c_stride,
                              c + column,
                              c_stride};
        if (full) {
          TileOfRows<kTileVectors>(count, product);
        } else {
          TileOfRows<1>(count, product);
        }
      }
    };
    float* u = scratch.u + row * padded;
    float* o = scratch.read + row * 2 * padded + padded;
    triangular(scratch.x + row * padded, scratch.inverse, nullptr, u, padded);
    triangular(u, scratch.mix, o, o, 2 * padded);
    for (int64_t column = 0; column < stride; column += kPanel) {
      TileOfRows<kTileVectors>(count, {u, padded, scratch.decayed_k + column, stride, chunk.count,
                                       from_start[chunk.count - 1],
                                       src == nullptr ? nullptr : src + row * stride + column,
                                       stride, dst + row * stride + column, stride});
    }
  });

  for (int64_t row = 0; row < rows; row += 4) {
    TransposeRows4(scratch.read + row * 2 * padded + padded, 2 * padded, padded, scratch.rows + row,
                   kValueBlock);
  }
  WithElementType(args.o_dtype, [&](auto element) HWY_ATTR {
    using T = decltype(element);
    T* o = static_cast<T*>(args.o) + hv * args.value_dim + v0;
    for (int64_t i = 0; i < chunk.count; ++i) {
      CopyFromFloat(scratch.rows + i * kValueBlock, row_count,
                    o + (chunk.begin + i) * args.o_token_stride);
    }
  });
}

template <typename TState>
void UnpackState(const TState* state, const gdn_delta_rule_args& args, float* out) {
  const auto dim = static_cast<size_t>(args.key_dim);
  const int64_t stride = PaddedKeyDim(args);
  for (int64_t v = 0; v < args.value_dim; ++v) {
    CopyToFloat(state + v * args.key_dim, dim, out + v * stride);
    std::fill(out + v * stride + args.key_dim, out + (v + 1) * stride, 0.0f);
  }
}

template <typename TState>
void PackState(const float* in, const gdn_delta_rule_args& args, TState* state) {
  for (int64_t v = 0; v < args.value_dim; ++v) {
    CopyFromFloat(in + v * PaddedKeyDim(args), static_cast<size_t>(args.key_dim),
                  state + v * args.key_dim);
  }
}

}  // namespace gdn::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
