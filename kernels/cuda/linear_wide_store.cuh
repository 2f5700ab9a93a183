// How the wide product's kernel writes y, and the first part of the norm behind.
#ifndef KERNELS_CUDA_LINEAR_WIDE_STORE_CUH_
#define KERNELS_CUDA_LINEAR_WIDE_STORE_CUH_

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/linear_rows.cuh"
#include "kernels/cuda/linear_wide.h"
#include "kernels/cuda/linear_wide_block.cuh"
#include "kernels/cuda/math.cuh"

namespace gdn::cuda::linear {

// y in the weight's type, through shared memory, so that it is written in whole lines.
template <typename W, int kRows, bool kGate, int kGroups>
__device__ inline void StoreNarrow(const LinearWideParams& p, unsigned char* shared,
                                   const float (&d)[kRows / 2]) {
  using Block = WideBlock<kGroups>;
  constexpr int kColumns = kGate ? Block::kColumns / 2 : Block::kColumns;
  constexpr int kVector = 16 / sizeof(W);
  constexpr int kPitch = kColumns + kVector;  // Moves each row to other banks.
  const int tid = static_cast<int>(threadIdx.x);
  const int lane = tid % 32;
  const int warp = tid / 32;
  W* const staged = reinterpret_cast<W*>(shared);
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      W* const row = staged + (8 * j + 2 * (lane % 4) + i) * kPitch;
      if constexpr (kGate) {
        row[8 * warp + lane / 4] = Narrow<W>(Silu(d[4 * j + i]) * d[4 * j + 2 + i]);
      } else {
        row[16 * warp + lane / 4] = Narrow<W>(d[4 * j + i]);
        row[16 * warp + 8 + lane / 4] = Narrow<W>(d[4 * j + 2 + i]);
      }
    }
  }
  Block::SyncConsumers();
  constexpr int kVectors = kColumns / kVector;
  const int row0 = static_cast<int>(blockIdx.y) * kRows;
  const int column0 = static_cast<int>(blockIdx.x) * kColumns;
#pragma unroll
  for (int i = tid; i < kRows * kVectors; i += Block::kConsumers) {
    const int row = i / kVectors;
    const int column = i % kVectors * kVector;
    if (row0 + row >= p.rows) break;
    const W* const from = staged + row * kPitch + column;
    W* const to = static_cast<W*>(p.y) + (row0 + row) * p.y_row_stride + column0 + column;
    const int left = p.outputs - column0 - column;
    if (p.y_vectors && left >= kVector) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    } else {
      for (int e = 0; e < min(left, kVector); ++e) to[e] = from[e];
    }
  }
}

// How the sums of a block lie in shared memory: by owner, each with its rows of every column.
template <int kRows, bool kGate, int kSplits, int kGroups>
struct SumsLayout {
  static constexpr int kColumns = WideBlock<kGroups>::kColumns / (kGate ? 2 : 1);
  static constexpr int kOwnRows = kRows / kSplits;
  static constexpr int kPitch = kOwnRows + 2;        // Moves each column to other banks.
  static constexpr int kFloats = kColumns * kPitch;  // Of one owner.
};

// Each block of a cluster sends its partial sums to their owners, of which each has kOwnRows rows
// of n. They wait in `staged` until they are gone, and arrive at `sums`, block after block; the
// owner's own stay in `staged`.
template <int kRows, bool kGate, int kSplits, int kGroups>
__device__ inline void SendSums(const WidePlace& place, float* staged, float* sums,
                                ArrivalBarrier* arrived, const float (&d)[kRows / 2]) {
  using Block = WideBlock<kGroups>;
  using Layout = SumsLayout<kRows, kGate, kSplits, kGroups>;
  const int tid = static_cast<int>(threadIdx.x);
  const int lane = tid % 32;
  const int warp = tid / 32;
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
    const int row = 8 * j + 2 * (lane % 4);
    float* const to = staged + row / Layout::kOwnRows * Layout::kFloats + row % Layout::kOwnRows;
    const auto store = [&](int column, float first, float second) {
      *reinterpret_cast<float2*>(to + column * Layout::kPitch) = {first, second};
    };
    if constexpr (kGate) {
      store(8 * warp + lane / 4, Silu(d[4 * j]) * d[4 * j + 2], Silu(d[4 * j + 1]) * d[4 * j + 3]);
    } else {
      store(16 * warp + lane / 4, d[4 * j], d[4 * j + 1]);
      store(16 * warp + 8 + lane / 4, d[4 * j + 2], d[4 * j + 3]);
    }
  }
  if constexpr (kSplits > 1) FenceForBulk();
  Block::SyncConsumers();
  if constexpr (kSplits > 1) {
    constexpr int kApart = Block::kConsumers / kSplits;  // Not all by one warp.
    const int owner = tid / kApart;
    if (tid % kApart == 0 && owner != static_cast<int>(place.z)) {
      SendBulk(sums + static_cast<int>(place.z) * Layout::kFloats, staged + owner * Layout::kFloats,
               Layout::kFloats * 4, place.Rank(place.x, place.y, static_cast<uint32_t>(owner)),
               arrived);
    }
    arrived->Wait(0);
  }
}

// The same where four blocks or two divide K: the sums travel as the matrix instruction leaves
// them, four of a thread at once, and are added before they are turned into rows of y.
template <int kRows, int kSplits, int kGroups>
struct QuadSums {
  using Block = WideBlock<kGroups>;
  static constexpr int kOwnRows = kRows / kSplits;
  // Of a pair of rows: a thread's four sums are of a column and of the column 8 on.
  static constexpr int kQuads = Block::kColumns / 2;
  static constexpr int kPairPitch = kQuads + 2;            // Moves each pair to other banks.
  static constexpr int kPart = kOwnRows / 2 * kPairPitch;  // Of one block for one owner.
  static constexpr int kPitch = Block::kColumns + 4;       // Of a row, in floats.
  static constexpr int kBytes = kPart * 16;

  float4* staged;    // What this block sends, and keeps of its own.
  float4* arriving;  // What it gets, block after block.
  float* rows;       // Its own rows of the sums.

  __device__ QuadSums(unsigned char* shared, int offset)
      : staged(reinterpret_cast<float4*>(shared)),
        arriving(reinterpret_cast<float4*>(shared + offset)),
        rows(reinterpret_cast<float*>(arriving + kSplits * kPart)) {}

  __device__ void Send(const WidePlace& place, ArrivalBarrier* arrived,
                       const float (&d)[kRows / 2]) const {
    const int tid = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      const int pair = 4 * j + tid % 4;  // kOwnRows / 2 pairs make a part.
      staged[pair * kPairPitch + tid / 4] = {d[4 * j], d[4 * j + 1], d[4 * j + 2], d[4 * j + 3]};
    }
    FenceForBulk();
    Block::SyncConsumers();
    constexpr int kApart = Block::kConsumers / kSplits;  // Not all by one warp.
    const int owner = tid / kApart;
    const int here = static_cast<int>(place.z);
    if (tid % kApart == 0 && owner != here) {
      SendBulk(arriving + here * kPart, staged + owner * kPart, kBytes,
               place.Rank(place.x, place.y, static_cast<uint32_t>(owner)), arrived);
    }
    arrived->Wait(0);
  }

  // In the blocks' order.
  __device__ void Add(int here) const {
    constexpr int kOwnQuads = kOwnRows / 2 * kQuads;
    static_assert(kOwnQuads % Block::kConsumers == 0);
#pragma unroll
    for (int first = 0; first < kOwnQuads; first += Block::kConsumers) {
      const int i = first + static_cast<int>(threadIdx.x);
      const int pair = i / kQuads;
      const int quad = i % kQuads;
      float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int s = 0; s < kSplits; ++s) {
        const float4 v = (s == here ? staged : arriving)[s * kPart + pair * kPairPitch + quad];
        sum = {sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w};
      }
      float* const to = rows + 2 * pair * kPitch + quad / 8 * 16 + quad % 8;
      to[0] = sum.x;
      to[kPitch] = sum.y;
      to[8] = sum.z;
      to[kPitch + 8] = sum.w;
    }
    Block::SyncConsumers();
  }
};

// The first part of the norm behind: v of rows row, row + kStep, ... and a column, the lanes of a
// warp in neighbouring columns of one group.
template <typename W, int kBatch, int kStep>
__device__ inline void StoreAfter(const LinearWideParams& p, int row, int column, float weight,
                                  const float (&v)[kBatch]) {
  static_assert(GDN_LINEAR_SQUARES_COLUMNS == 32);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool inside = column < p.outputs;
  float square[kBatch];
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    square[i] = inside ? v[i] * v[i] : 0.0f;
    const int at = row + i * kStep;
    if (inside && at < p.rows) {
      static_cast<W*>(p.after_n)[int64_t{at} * p.outputs + column] = Narrow<W>(v[i] * weight);
    }
  }
  const float sum = SumLanes<kBatch>(square, lane);
  const int at = row + lane * kBatch / 32 * kStep;
  if (lane % (32 / kBatch) == 0 && column - lane < p.outputs && at < p.rows) {
    p.after_squares[int64_t{column / 32} * p.rows + at] = sum;
  }
}

// Any y: the sums of the cluster's blocks, added in the blocks' order.
template <typename W, int kRows, bool kGate, int kSplits, int kGroups>
__device__ inline void StoreSums(const LinearWideParams& p, const WidePlace& place,
                                 unsigned char* shared, ArrivalBarrier* arrived,
                                 const float (&d)[kRows / 2]) {
  using Layout = SumsLayout<kRows, kGate, kSplits, kGroups>;
  constexpr int kStep = WideBlock<kGroups>::kConsumers / Layout::kColumns;  // Rows at once.
  constexpr int kRowsEach = Layout::kOwnRows / kStep;                       // Of a thread.
  constexpr int kBatch = kRowsEach < 8 ? kRowsEach : 8;  // Rows a thread has in flight.
  const int tid = static_cast<int>(threadIdx.x);
  float* const staged = reinterpret_cast<float*>(shared);
  float* const sums = reinterpret_cast<float*>(shared + p.sums_offset);

  const int column = tid % Layout::kColumns;
  const int at_column = static_cast<int>(blockIdx.x) * Layout::kColumns + column;
  const int first_row = tid / Layout::kColumns;
  const int row0 =
      static_cast<int>(blockIdx.y) * kRows + static_cast<int>(place.z) * Layout::kOwnRows;
  const int rows = at_column < p.outputs ? p.rows - row0 : 0;
  float* const y32 = static_cast<float*>(p.y) + row0 * p.y_row_stride + at_column;
  W* const y16 = static_cast<W*>(p.y) + row0 * p.y_row_stride + at_column;
  float old[kBatch];
  const auto load_old = [&](int first) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int row = first + i * kStep;
      old[i] = p.accumulate && row < rows ? __ldcg(y32 + row * p.y_row_stride) : 0.0f;
    }
  };
  load_old(first_row);
  float after_weight = 0.0f;
  if (p.after_norm != nullptr && at_column < p.outputs) {
    after_weight = __ldg(p.after_norm + at_column);
  }
  const int here = static_cast<int>(place.z);
  constexpr bool kQuadwise = SumsInQuads(kSplits);
  const float* from[kSplits];
  if constexpr (kQuadwise) {
    static_assert(!kGate);
    const QuadSums<kRows, kSplits, kGroups> quads(shared, p.sums_offset);
    quads.Send(place, arrived, d);
    quads.Add(here);
    from[0] = quads.rows + column;
  } else {
    SendSums<kRows, kGate, kSplits, kGroups>(place, staged, sums, arrived, d);
#pragma unroll
    for (int s = 0; s < kSplits; ++s) {
      from[s] = (s == here ? staged : sums) + s * Layout::kFloats + column * Layout::kPitch;
    }
  }
#pragma unroll 1
  for (int batch = 0; batch < kRowsEach / kBatch; ++batch) {
    const int first = first_row + batch * kBatch * kStep;
    if (batch > 0) load_old(first);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int row = first + i * kStep;
      if constexpr (kQuadwise) {
        old[i] += from[0][row * QuadSums<kRows, kSplits, kGroups>::kPitch];
      } else {
        float sum = 0.0f;
#pragma unroll
        for (int s = 0; s < kSplits; ++s) sum += from[s][row];
        old[i] += sum;
      }
    }
    if (p.after_norm != nullptr) {
      StoreAfter<W, kBatch, kStep>(p, row0 + first, at_column, after_weight, old);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int row = first + i * kStep;
      if (row >= rows) break;
      if (p.y_is_f32) {
        y32[row * p.y_row_stride] = old[i];
      } else {
        y16[row * p.y_row_stride] = Narrow<W>(old[i]);
      }
    }
  }
}

}  // namespace gdn::cuda::linear

#endif  // KERNELS_CUDA_LINEAR_WIDE_STORE_CUH_
