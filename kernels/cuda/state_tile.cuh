// The two ways in which a warp holds eight rows of a state tile with K = 128, and one order of
// summation for both.
//
// From global memory (SplitTile): an access of the warp covers 512 neighbouring bytes, which the
// memory system likes best; a lane holds 16 bytes of each of its accesses, access i in row
// FirstRow(lane) + i kAccessRows, and sums over a row go through all lanes that share it. From
// shared memory (StreamTile): eight lanes share a row, a lane has sixteen columns of two rows, and
// sums are short.
//
// Order of a sum over a row's columns: within 16 bytes of FP32 or BF16 state in sequence; then
// those whose columns differ by 32 (FP32: by 32, then by 64; BF16: by 64), then pairs of neighbours
// at distance 4, 2 and 1 lanes of eight. Order of a sum over eight rows: rows that differ in bit 2,
// then in bit 0, then in bit 1.
#ifndef KERNELS_CUDA_STATE_TILE_CUH_
#define KERNELS_CUDA_STATE_TILE_CUH_

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/math.cuh"

namespace gdn::cuda {

constexpr int kTileRows = 8;
constexpr int kTileColumns = 128;

// Sixteen bytes of state.
template <typename S>
struct Piece;
template <>
struct Piece<float> {
  using Raw = float4;
  static constexpr int kVec = 4;
  static __device__ void Unpack(const Raw& raw, float* values) {
    values[0] = raw.x;
    values[1] = raw.y;
    values[2] = raw.z;
    values[3] = raw.w;
  }
  static __device__ Raw Pack(const float* values) {
    return make_float4(values[0], values[1], values[2], values[3]);
  }
  static __device__ Raw Zero() { return make_float4(0.0f, 0.0f, 0.0f, 0.0f); }
};
template <>
struct Piece<Bf16> {
  using Raw = uint4;
  static constexpr int kVec = 8;
  static __device__ void Unpack(const Raw& raw, float* values) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[2 * i] = __uint_as_float(words[i] << 16);
      values[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  }
  static __device__ Raw Pack(const float* values) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
      words[i] = *reinterpret_cast<const uint32_t*>(&pair);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
  static __device__ Raw Zero() { return make_uint4(0, 0, 0, 0); }
};

// Sum over the lanes that differ in the given bits, in this order.
template <int... kBits>
__device__ inline float SumOverLanes(float value) {
  ((value += __shfl_xor_sync(kFullMask, value, kBits)), ...);
  return value;
}

template <typename S>
struct SplitTile;

template <>
struct SplitTile<float> {
  static constexpr int kAccesses = 8;
  static constexpr int kAccessRows = 1;
  static __device__ int Column(int lane) { return 4 * lane; }
  static __device__ int FirstRow(int) { return 0; }
  static __device__ int OwnRow(int lane) { return (lane >> 4) << 2 | (lane >> 1 & 3); }
  // A lane whose own row is that of the access.
  static __device__ int Owner(int access, int) { return (access & 4) << 2 | (access & 3) << 1; }
  static __device__ float SumColumns(float value) { return SumOverLanes<8, 16, 4, 2, 1>(value); }
  static __device__ float SumRows(float value) { return SumOverLanes<16, 2, 4>(value); }
};

template <>
struct SplitTile<Bf16> {
  static constexpr int kAccesses = 4;
  static constexpr int kAccessRows = 2;
  static __device__ int Column(int lane) { return 8 * (lane & 15); }
  static __device__ int FirstRow(int lane) { return lane >> 4; }
  static __device__ int OwnRow(int lane) { return (lane >> 1 & 3) << 1 | lane >> 4; }
  static __device__ int Owner(int access, int lane) { return (lane & 16) | access << 1; }
  static __device__ float SumColumns(float value) { return SumOverLanes<8, 4, 2, 1>(value); }
  static __device__ float SumRows(float value) { return SumOverLanes<4, 16, 2>(value); }
};

// One step of ReduceRows: lanes with `bit` set keep the upper half of `values`.
template <int kHalf>
__device__ inline void Halve(float* values, int lane, int bit) {
  const bool upper = (lane & bit) != 0;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float keep = upper ? values[i + kHalf] : values[i];
    const float send = upper ? values[i] : values[i + kHalf];
    values[i] = keep + __shfl_xor_sync(kFullMask, send, bit);
  }
}

// Totals of a warp's partial products with two vectors: at each step a lane keeps half of its
// values and sends the other half to the lane that keeps those, so that sixteen sums cost hardly
// more than one. A lane ends with both totals of its own row.
template <typename S>
__device__ inline float2 ReduceRows(const float* first, const float* second, int lane) {
  constexpr int kAccesses = SplitTile<S>::kAccesses;
  constexpr int kVectorLane = 8;
  float values[2 * kAccesses];
#pragma unroll
  for (int i = 0; i < kAccesses; ++i) {
    values[i] = first[i];
    values[kAccesses + i] = second[i];
  }
  Halve<kAccesses>(values, lane, kVectorLane);
  if constexpr (kAccesses == 8) Halve<4>(values, lane, 16);
  Halve<2>(values, lane, 4);
  Halve<1>(values, lane, 2);
  const float mine = values[0] + __shfl_xor_sync(kFullMask, values[0], 1);
  const float other = __shfl_xor_sync(kFullMask, mine, kVectorLane);
  const bool has_second = (lane & kVectorLane) != 0;
  return make_float2(has_second ? other : mine, has_second ? mine : other);
}

// Of the four lanes with the same own row, the one that stores.
__device__ inline bool IsRowWriter(int lane) { return (lane & 9) == 0; }

template <typename S>
struct StreamTile {
  static constexpr int kVec = Piece<S>::kVec;
  static constexpr int kRows = 2;
  static constexpr int kPieces = 16 / kVec;
  static __device__ int Row(int i, int lane) { return 4 * i + (lane >> 3); }
  static __device__ int Column(int piece, int lane) { return kVec * ((lane & 7) + 8 * piece); }
  // From a lane's products with its pieces, each summed in sequence.
  static __device__ float Combine(const float (&pieces)[kPieces]) {
    if constexpr (kPieces == 4) return (pieces[0] + pieces[1]) + (pieces[2] + pieces[3]);
    return pieces[0] + pieces[1];
  }
};

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_STATE_TILE_CUH_
