// What the warpgroups of the last kernel of the chunked backward share, and how a thread finds its
// elements there: see delta_rule_backward_chunk_keys.cuh.
#ifndef KERNELS_CUDA_DELTA_RULE_BACKWARD_CHUNK_KEYS_SHARED_CUH_
#define KERNELS_CUDA_DELTA_RULE_BACKWARD_CHUNK_KEYS_SHARED_CUH_

#include "kernels/cuda/delta_rule_backward_chunk.cuh"
#include "kernels/cuda/delta_rule_backward_chunk_prepare.cuh"

namespace gdn::cuda::chunk {

template <int kPanels>
constexpr int kKeysThreads = 2 * kPanels* kGroup;
constexpr int kPassingStride = kChunk + 8;  // Pairs of neighbouring rows in different banks.

// A chunk of a key head; unit < 0: there is none.
struct KeysUnit {
  int64_t unit;
  int64_t slot;
  int64_t key_head;
  SlotChunk chunk;
};

template <int kPanels>
struct KeysShared {
  static constexpr int kParts = kKeysThreads<kPanels> / kChunk;

  Tile<kPanels> q;
  Tile<kPanels> k;
  Tile<kPanels> d_o;
  Tile<kPanels> u;
  Tile<kPanels> d_r;
  Tile<kPanels> v;
  StateTile<kPanels> states;
  StateTile<kPanels> d_states;
  uint16_t a[kPanelElements];
  uint16_t b[kPanelElements];
  float passing[2][kChunk * kPassingStride];  // Z, that of A and that of B.
  UnitScalars scalars;
  // Sums over a row; by warpgroups, of which each has half of the columns.
  float taken[2][kPanels][kChunk];   // What a token takes from S through q and through k: of d_g.
  float given[kPanels][kChunk];      // What it gives to the next state: of d_g.
  float predicted[kPanels][kChunk];  // k.(dR S)
  float valued[kPanels][kChunk];     // dR.v
  float written[kPanels][kChunk];    // sum_j exp(G_i - G_j) k_i.k_j X[i][j]
  float edges[kChunk];               // What those before give and those from there on take.
  float states_dot[kPanels * kGroup / 32];
  float parts[kParts][kChunk];
  float tangent[2][kPanels][kChunk];  // dq.q and dk.k
  KeysUnit unit[2];                   // This one and the next, alternately.
};

// The sum over a row of a warp's sum, of which four neighbouring lanes hold parts.
__device__ inline float QuadSum(float x) { return LaneSum<3>(x); }

// The elements that a thread holds of a sum, in a panel of a tile: see wgmma.cuh.
class SumElements {
 public:
  __device__ SumElements(const uint16_t (&panel)[kPanelElements], int row, int lane)
      : row_(SharedAddress(panel) + static_cast<uint32_t>(row) * kPanelRowBytes +
             static_cast<uint32_t>(lane % 4) * 4),
        swizzle_(static_cast<uint32_t>(row % 8) * 16) {}
  // Two neighbours of group t, in the thread's row or, kNext, the one 8 further.
  template <typename X, bool kNext>
  __device__ float2 At(int t) const {
    uint32_t word;
    asm volatile(
        "ld.shared.b32 %0, [%1];"
        : "=r"(word)
        : "r"(row_ + (static_cast<uint32_t>(16 * t) ^ swizzle_) + (kNext ? 8 * kPanelRowBytes : 0))
        : "memory");
    return UnpackPair<X>(word);
  }

 private:
  uint32_t row_;
  uint32_t swizzle_;
};

}  // namespace gdn::cuda::chunk

#endif  // KERNELS_CUDA_DELTA_RULE_BACKWARD_CHUNK_KEYS_SHARED_CUH_
