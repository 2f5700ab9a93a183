// How a warp holds eight rows of a state tile with K = 128, and the reductions over it.
//
// Each lane holds kVec neighbouring columns of kLoads rows, one 16-byte access each. Reduce() turns
// the per-lane partial dot products of all eight rows with two vectors into totals, one per lane:
// at each step a lane keeps half of its values and sends the other half to the lane that keeps
// those, so eight rows cost hardly more shuffles than one. Lane l ends with the total of row
// OwnRow(l), with the first vector or the second; Exchange() gives it the other of the two.
#ifndef KERNELS_CUDA_STATE_TILE_CUH_
#define KERNELS_CUDA_STATE_TILE_CUH_

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/math.cuh"

namespace gdn::cuda {

constexpr int kTileRows = 8;

// One halving step: lanes with `bit` set keep the upper half of `values`.
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

template <typename S>
struct StateTile;

template <>
struct StateTile<float> {
  static constexpr int kVec = 4;
  static constexpr int kLoads = 8;
  static constexpr int kColumnLanes = 31;  // Lane bits that tell columns apart,
  static constexpr int kRowLanes = 14;     // and those that tell own rows apart.
  static constexpr int kVectorLane = 16;   // The bit that tells the two vectors apart.
  using Raw = float4;

  static __device__ int Column(int lane) { return 4 * lane; }
  static __device__ int Row(int load, int) { return load; }
  static __device__ int OwnRow(int lane) { return (lane >> 1) & 7; }
  // A lane whose own row is Row(load, lane).
  static __device__ int Owner(int load, int) { return 2 * load; }

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
struct StateTile<Bf16> {
  static constexpr int kVec = 8;
  static constexpr int kLoads = 4;
  static constexpr int kColumnLanes = 15;
  static constexpr int kRowLanes = 22;
  static constexpr int kVectorLane = 8;
  using Raw = uint4;

  static __device__ int Column(int lane) { return 8 * (lane & 15); }
  static __device__ int Row(int load, int lane) { return 2 * load + (lane >> 4); }
  static __device__ int OwnRow(int lane) { return 2 * ((lane >> 1) & 3) + (lane >> 4); }
  static __device__ int Owner(int load, int lane) { return (lane & 16) | (2 * load); }

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

// first[] and second[] are a lane's partial sums per load. Returns the total of the lane's own row
// with the first vector, or with the second where the lane has kVectorLane set.
template <typename Tile>
__device__ inline float Reduce(const float* first, const float* second, int lane) {
  constexpr int kLoads = Tile::kLoads;
  float values[2 * kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    values[i] = first[i];
    values[kLoads + i] = second[i];
  }
  Halve<kLoads>(values, lane, Tile::kVectorLane);
  if constexpr (kLoads == 8) Halve<4>(values, lane, 8);
  Halve<2>(values, lane, 4);
  Halve<1>(values, lane, 2);
  return values[0] + __shfl_xor_sync(kFullMask, values[0], 1);
}

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_STATE_TILE_CUH_
