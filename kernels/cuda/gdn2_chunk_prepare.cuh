// The first kernel of chunked GDN2: see gdn2_chunk.cuh. A block takes a chunk of a gate head. Four
// of its warps sum pairs within blocks of 16 tokens, which takes the most; the other four write the
// decayed rows, and w v of the gate head's value heads, and form the blocks below the diagonal,
// before they help.
#ifndef KERNELS_CUDA_GDN2_CHUNK_PREPARE_CUH_
#define KERNELS_CUDA_GDN2_CHUNK_PREPARE_CUH_

#include "kernels/cuda/async_copy.cuh"
#include "kernels/cuda/delta_rule_chunk_solve.cuh"
#include "kernels/cuda/gdn2_chunk.cuh"
#include "kernels/cuda/state_tile.cuh"
#include "kernels/cuda/vector.cuh"

namespace gdn::cuda::gdn2 {

constexpr int kPrepareThreads = 2 * kGroup;
constexpr int kPrepareBarrier = 1;
constexpr int kBlock = 16;  // Tokens.
// Elements between rows, FP32 or FP16: an operand's eight rows then lie in different banks.
constexpr int kStride = kDim + 8;

struct PrepareShared {
  union {
    float log_decay[kChunk][kStride];  // G / ln 2
    uint16_t t[kPanelElements];        // Once G is no longer needed.
  };
  // Rows of unit norm, FP16.
  uint16_t k[kChunk][kStride];
  uint16_t q[kChunk][kStride];
  uint16_t erased[kChunk][kStride];  // e k
  uint16_t p[kPanelElements];
  Solve solve;  // A
  float size[kChunk];
  float first_half[kDim];  // G of token 31.
};

// Eight neighbouring elements; past the sequence's end zeros.
template <typename T>
__device__ inline Vector<T> LoadEight(const void* data, int64_t index, bool inside) {
  Vector<T> eight{};
  if (inside) eight = LoadVector(static_cast<const T*>(data) + index);
  return eight;
}
template <typename T>
__device__ inline void WidenEight(const Vector<T>& eight, float (&x)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = Widen(eight.element[i]);
}
__device__ inline uint4 PackEight(const float (&x)[8]) {
  return make_uint4(PackHalves(x[0], x[1]), PackHalves(x[2], x[3]), PackHalves(x[4], x[5]),
                    PackHalves(x[6], x[7]));
}

// g as a log decay in base 2, never above 0; a NaN stays one.
__device__ inline float LogDecayOf(float g) {
  float x = LogDecay2(g);
  asm("min.NaN.f32 %0, %0, 0f00000000;" : "+f"(x));
  return x;
}

// A block's chunk and heads.
struct PreparePlace {
  SlotChunk chunk;
  int64_t slot;
  int64_t gate_head;
  int64_t key_head;
  ChunkTile* tile;
};

// Starts the copy of g; rows past the end become zeros.
__device__ inline void LoadDecays(const Params& p, const PreparePlace& at, int thread,
                                  PrepareShared& shared) {
  const gdn2_args& a = p.args;
  constexpr int kVectors = kDim / 4;
  constexpr int kStep = kPrepareThreads / kVectors;
  const int column = thread % kVectors * 4;
  const int64_t stride = a.gate_heads * kDim;
  int row = thread / kVectors;
  const float* from = a.g + (at.chunk.begin + row) * stride + at.gate_head * kDim + column;
#pragma unroll
  for (int i = 0; i < kChunk / kStep; ++i, row += kStep, from += kStep * stride) {
    const bool inside = row < at.chunk.count;
    CopyOrZero(SharedAddress(&shared.log_decay[row][column]), inside ? from : a.g, inside);
  }
  CommitCopies();
}

// G from g. A thread sums a channel of 32 tokens; sums of non-positive terms never grow, rounded or
// not.
__device__ inline void SumDecays(int thread, PrepareShared& shared) {
  const int channel = thread % kDim;
  const int top = thread / kDim * (kChunk / 2);
  float sums[kChunk / 2];
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kChunk / 2; ++i) {
    sum += LogDecayOf(shared.log_decay[top + i][channel]);
    sums[i] = sum;
  }
  if (top == 0) {
    shared.first_half[channel] = sum;
#pragma unroll
    for (int i = 0; i < kChunk / 2; ++i) shared.log_decay[i][channel] = sums[i];
  }
  __syncthreads();
  if (top != 0) {
    const float before = shared.first_half[channel];
#pragma unroll
    for (int i = 0; i < kChunk / 2; ++i) shared.log_decay[top + i][channel] = before + sums[i];
  }
}

// Brings a row, of which four neighbouring threads have a quarter each, to unit norm. Returns its
// size for whom the op does not normalise.
__device__ inline float UnitRow(bool normalize, float (&x)[4][8]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 32; ++i) sum = fmaf(x[i / 8][i % 8], x[i / 8][i % 8], sum);
  sum = LaneSum<3>(sum);
  const float squares = normalize ? sum + kQkNormEps : sum;
  const float factor = squares > 0.0f || squares != squares ? rsqrtf(squares) : 0.0f;
#pragma unroll
  for (int i = 0; i < 32; ++i) x[i / 8][i % 8] *= factor;
  return normalize ? 1.0f : sum * factor;
}

// k, q and e k of the chunk's tokens, four threads a token. X, E: types of k and of e.
template <typename X, typename E>
__device__ inline void LoadRows(const Params& p, const PreparePlace& at, int thread,
                                PrepareShared& shared) {
  const gdn2_args& a = p.args;
  const int row = thread / 4;
  const int first = thread % 4 * 8;  // Of the thread's columns; the next ones are 32 further.
  const bool inside = row < at.chunk.count;
  const int64_t token = at.chunk.begin + row;
  const int64_t k_offset = token * a.k_token_stride + at.key_head * kDim + first;
  const int64_t q_offset = token * a.q_token_stride + at.key_head * kDim + first;
  const int64_t e_offset = (token * a.gate_heads + at.gate_head) * kDim + first;
  Vector<X> k[4];
  Vector<X> q[4];
  Vector<E> e[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    k[i] = LoadEight<X>(a.k, k_offset + 32 * i, inside);
    q[i] = LoadEight<X>(a.q, q_offset + 32 * i, inside);
    e[i] = LoadEight<E>(a.erase, e_offset + 32 * i, inside);
  }
  const bool normalize = a.use_qk_l2norm != 0;
  float x[4][8];
#pragma unroll
  for (int i = 0; i < 4; ++i) WidenEight(k[i], x[i]);
  const float size = UnitRow(normalize, x);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    *reinterpret_cast<uint4*>(&shared.k[row][first + 32 * i]) = PackEight(x[i]);
    float erased[8];
    WidenEight(e[i], erased);
#pragma unroll
    for (int j = 0; j < 8; ++j) erased[j] *= x[i][j];
    *reinterpret_cast<uint4*>(&shared.erased[row][first + 32 * i]) = PackEight(erased);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) WidenEight(q[i], x[i]);
  const float query = p.scale * UnitRow(normalize, x);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    *reinterpret_cast<uint4*>(&shared.q[row][first + 32 * i]) = PackEight(x[i]);
  }
  if (first == 0) {
    shared.size[row] = size;
    at.tile->size[row] = size;
    at.tile->query[row] = query;
  }
}

__device__ inline float2 ReadTwo(const float* from) {
  return *reinterpret_cast<const float2*>(from);
}
__device__ inline float2 ReadTwo(const uint16_t* from) {
  return UnpackPair<F16>(*reinterpret_cast<const uint32_t*>(from));
}
__device__ inline float Component(const float2& pair, int c) { return c == 0 ? pair.x : pair.y; }

// A and P within a block of 16 tokens, pair by pair in FP32, in kPairRounds rounds of a warp.
// Sixteen lanes take a tile of four rows i and four columns j, and split the channels. A key decays
// from row to row of the tile.
constexpr int kPairRounds = 5;
__device__ inline void SumPairs(int block, int first_round, int last_round, int lane,
                                PrepareShared& shared) {
  constexpr int kTile = 4;
  const int top = kBlock * block;
  const int part = lane / 16;
  const int split = lane % 16;
#pragma unroll 1
  for (int round = first_round; round < last_round; ++round) {
    // Rows a and 3 - a of tiles have five tiles on and below the diagonal.
    const bool first = round <= part;
    const int tile_row = first ? part : 3 - part;
    const int tile_column = first ? round : round - part - 1;
    const bool on_diagonal = tile_row == tile_column;
    const int i = top + kTile * tile_row;
    const int j = top + kTile * tile_column;
    float sums[2 * kTile * kTile] = {};  // A's, P's
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const int channel = 2 * split + 32 * m;
      float2 later[kTile], earlier[kTile], erased[kTile], query[kTile], key[kTile];
#pragma unroll
      for (int r = 0; r < kTile; ++r) {
        later[r] = ReadTwo(&shared.log_decay[i + r][channel]);
        earlier[r] = ReadTwo(&shared.log_decay[j + r][channel]);
        erased[r] = ReadTwo(&shared.erased[i + r][channel]);
        query[r] = ReadTwo(&shared.q[i + r][channel]);
        key[r] = ReadTwo(&shared.k[j + r][channel]);
      }
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        // On the diagonal a key of a later row has not begun to decay.
        float decayed[kTile];
#pragma unroll
        for (int s = 0; s < kTile; ++s) {
          decayed[s] =
              Component(key[s], c) * DecayBetween(Component(later[0], c), Component(earlier[s], c));
        }
#pragma unroll
        for (int r = 0; r < kTile; ++r) {
#pragma unroll
          for (int s = 0; s < kTile; ++s) {
            float* const sum = &sums[kTile * r + s];
            sum[0] = fmaf(Component(erased[r], c), decayed[s], sum[0]);
            sum[kTile * kTile] = fmaf(Component(query[r], c), decayed[s], sum[kTile * kTile]);
          }
          if (r + 1 == kTile) break;
          const float step = Exp2(Component(later[r + 1], c) - Component(later[r], c));
          const float not_begun = on_diagonal ? 1.0f : step;
#pragma unroll
          for (int s = 0; s < kTile; ++s) decayed[s] *= s > r ? not_begun : step;
        }
      }
    }
    // Each lane ends with the totals of two neighbouring columns.
    Halve<16>(sums, lane, 8);
    Halve<8>(sums, lane, 4);
    Halve<4>(sums, lane, 2);
    Halve<2>(sums, lane, 1);
    const int row = kTile * tile_row + split / 2 % 4;
    const int column = kTile * tile_column + split % 2 * 2;
    if (split < 8) {
      float* const to = &shared.solve.diagonal[block][column * kDiagonalStride + row];
      const float2 size = ReadTwo(&shared.size[top + column]);
      to[0] = shared.size[top + row] * size.x * sums[0];
      to[kDiagonalStride] = shared.size[top + row] * size.y * sums[1];
    } else {
      char* const panel = reinterpret_cast<char*>(shared.p);
      *reinterpret_cast<uint32_t*>(panel + PanelOffset(top + row, (top + column) / 8) +
                                   (top + column) % 8 * 2) =
          PackHalves(column <= row ? sums[0] : 0.0f, column < row ? sums[1] : 0.0f);
    }
  }
}

// Two neighbouring FP16 elements, decayed.
__device__ inline uint32_t Decayed(const uint16_t* pair, float2 factor) {
  const float2 x = ReadTwo(pair);
  return PackHalves(x.x * factor.x, x.y * factor.y);
}
__device__ inline float2 DecayPair(float2 later, float2 earlier) {
  return make_float2(Exp2(later.x - earlier.x), Exp2(later.y - earlier.y));
}

// A and P below the diagonal blocks. Of the row blocks 3, 3, 2 and 1 a warp takes these groups of
// eight columns: 0 to 2, 3 to 5, 0 to 3, 0 and 1.
__device__ inline void MultiplyBlocks(int warp, int lane, PrepareShared& shared) {
  const int block = warp < 2 ? 3 : 4 - warp;
  const int first = warp == 1 ? 3 : 0;
  const int groups = warp < 2 ? 3 : 2 * block;
  const int row = kBlock * block + lane / 4;
  const float* const before = shared.log_decay[kBlock * block - 1];
  float a[4][4] = {};
  float p[4][4] = {};
#pragma unroll 1
  for (int step = 0; step < kDim / 16; ++step) {
    const int channel = 16 * step + lane % 4 * 2;
    const float2 start[2] = {ReadTwo(before + channel), ReadTwo(before + channel + 8)};
    uint32_t erased[4];
    uint32_t query[4];
#pragma unroll
    for (int v = 0; v < 4; ++v) {
      const int i = row + v % 2 * 8;
      const int c = channel + v / 2 * 8;
      const float2 decay = DecayPair(ReadTwo(&shared.log_decay[i][c]), start[v / 2]);
      erased[v] = Decayed(&shared.erased[i][c], decay);
      query[v] = Decayed(&shared.q[i][c], decay);
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (n < groups) {
        const int j = 8 * (first + n) + lane / 4;
        uint32_t key[2];
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          const int c = channel + 8 * v;
          key[v] = Decayed(&shared.k[j][c], DecayPair(start[v], ReadTwo(&shared.log_decay[j][c])));
        }
        Product16(a[n], erased, key[0], key[1]);
        Product16(p[n], query, key[0], key[1]);
      }
    }
  }
  char* const system = reinterpret_cast<char*>(shared.solve.system);
  char* const mix = reinterpret_cast<char*>(shared.p);
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    if (n < groups) {
      const float2 size = ReadTwo(&shared.size[8 * (first + n) + lane % 4 * 2]);
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        const int i = row + 8 * v;
        const uint32_t to = PanelOffset(i, first + n) + static_cast<uint32_t>(lane) % 4 * 4;
        *reinterpret_cast<uint32_t*>(system + to) = PackHalves(
            shared.size[i] * size.x * a[n][2 * v], shared.size[i] * size.y * a[n][2 * v + 1]);
        *reinterpret_cast<uint32_t*>(mix + to) = PackHalves(p[n][2 * v], p[n][2 * v + 1]);
      }
    }
  }
}

// Where a thread of four warps finds the i-th of its eight vectors of a chunk's 64 rows of 128.
struct VectorPlace {
  int row;
  int column;
  uint32_t offset;  // In two panels.
};
__device__ inline VectorPlace VectorOf(int thread, int i) {
  const int row = thread / 16 + 8 * i;
  const int vector = thread % 16;
  return {row, 8 * vector,
          static_cast<uint32_t>(vector) / 8 * kPanelBytes + PanelOffset(row, vector % 8)};
}
__device__ inline void StoreEight(ValueTile& tile, uint32_t offset, const float (&x)[8]) {
  *reinterpret_cast<uint4*>(reinterpret_cast<char*>(tile) + offset) = PackEight(x);
}

// w v of the gate head's value heads. X, W: types of v and of w.
template <typename X, typename W>
__device__ inline void WriteValues(const Params& p, const PreparePlace& at, int thread) {
  const gdn2_args& a = p.args;
#pragma unroll 1
  for (int h = 0; h < p.gate_ratio; ++h) {
    const int64_t head = at.gate_head * p.gate_ratio + h;
    ValueTile& tile = p.values[at.slot * a.value_heads + head];
    const VectorPlace start = VectorOf(thread, 0);
    const int64_t token = at.chunk.begin + start.row;
    const int64_t column = head * kDim + start.column;
    const int64_t v_offset = token * a.v_token_stride + column;
    const int64_t w_offset = token * a.value_heads * kDim + column;
#pragma unroll 1
    for (int first = 0; first < 8; first += 4) {
      Vector<X> v[4];
      Vector<W> w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int below = 8 * (first + i);  // Rows.
        const bool inside = start.row + below < at.chunk.count;
        v[i] = LoadEight<X>(a.v, v_offset + below * a.v_token_stride, inside);
        w[i] = LoadEight<W>(a.write, w_offset + below * a.value_heads * kDim, inside);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float written[8];
        float strength[8];
        WidenEight(v[i], written);
        WidenEight(w[i], strength);
#pragma unroll
        for (int j = 0; j < 8; ++j) written[j] *= strength[j];
        StoreEight(tile, VectorOf(thread, first + i).offset, written);
      }
    }
  }
}

// The decayed rows, and the chunk's decay.
__device__ inline void WriteRows(const PreparePlace& at, int thread, const PrepareShared& shared) {
  const float* const last = shared.log_decay[kChunk - 1];
  at.tile->decay[thread] = Exp2(last[thread]);
#pragma unroll 1
  for (int i = 0; i < 8; ++i) {
    const VectorPlace place = VectorOf(thread, i);
    float from_start[8];
    float to_end[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float log_decay = shared.log_decay[place.row][place.column + j];
      from_start[j] = Exp2(log_decay);
      to_end[j] = Exp2(last[place.column + j] - log_decay);
    }
    const auto decayed = [&](const uint16_t(&rows)[kChunk][kStride], const float(&factor)[8],
                             ValueTile& to) {
      float x[8];
      WidenEight(LoadVector(reinterpret_cast<const F16*>(&rows[place.row][place.column])), x);
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] *= factor[j];
      StoreEight(to, place.offset, x);
    };
    decayed(shared.erased, from_start, at.tile->erased);
    decayed(shared.q, from_start, at.tile->queries);
    decayed(shared.k, to_end, at.tile->keys);
  }
}

__device__ inline void ClearPanel(uint16_t (&panel)[kPanelElements], int thread) {
#pragma unroll
  for (int i = thread; i < kPanelElements / 8; i += kPrepareThreads) {
    reinterpret_cast<uint4*>(panel)[i] = uint4{};
  }
}

// X: type of q, k and v; E: of erase and write.
template <typename X, typename E>
__global__ void __launch_bounds__(kPrepareThreads, 2)
    PrepareKernel(const __grid_constant__ Params p) {
#ifdef GDN_WGMMA
  extern __shared__ uint4 prepare_memory[];
  auto& shared = *reinterpret_cast<PrepareShared*>(prepare_memory);
  const gdn2_args& a = p.args;
  PreparePlace at;
  const auto gate_heads = static_cast<uint32_t>(a.gate_heads);
  const uint32_t gate_head = blockIdx.x % gate_heads;
  at.slot = blockIdx.x / gate_heads;
  at.gate_head = gate_head;
  at.key_head = gate_head * static_cast<uint32_t>(p.gate_ratio) / static_cast<uint32_t>(p.ratio);
  at.tile = p.tiles + blockIdx.x;
  if (!ChunkOfSlot(a.cu_seqlens, a.sequences, at.slot, &at.chunk)) return;
  if (at.chunk.count == 0) return;
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32;
  const int lane = thread % 32;
  LoadDecays(p, at, thread, shared);
  LoadRows<X, E>(p, at, thread, shared);
  ClearPanel(shared.p, thread);
  WaitForCopies<0>();
  __syncthreads();
  SumDecays(thread, shared);
  __syncthreads();
  // Rows and values take as long as three rounds of pairs.
  const bool pairs_only = warp < 4;
  if (!pairs_only) {
    WriteValues<X, E>(p, at, thread - kGroup);
    WriteRows(at, thread - kGroup, shared);
    MultiplyBlocks(warp - 4, lane, shared);
  }
  SumPairs(warp % 4, pairs_only ? 0 : kPairRounds - 1, pairs_only ? kPairRounds - 1 : kPairRounds,
           lane, shared);
  FenceForBulk();
  __syncthreads();
  if (thread == 0) BulkStore(at.tile->p, shared.p, kPanelBytes);
  ClearPanel(shared.t, thread);
  FenceForBulk();
  __syncthreads();
  if (warp >= 4) return;
  const uint32_t system = SharedAddress(shared.solve.system);
  const uint32_t t = SharedAddress(shared.t);
  InvertDiagonal(shared.solve.diagonal[warp], t, warp, lane);
  NamedBarrier(kPrepareBarrier, kGroup);
  MergeSixteens(system, t, warp, lane);
  NamedBarrier(kPrepareBarrier, kGroup);
  MergeThirtyTwos(system, t, warp, lane);
  FenceForBulk();
  NamedBarrier(kPrepareBarrier, kGroup);
  if (thread == 0) {
    BulkStore(at.tile->t, shared.t, kPanelBytes);
    WaitForBulkReads<0>();
  }
#endif
}

}  // namespace gdn::cuda::gdn2

#endif  // KERNELS_CUDA_GDN2_CHUNK_PREPARE_CUH_
