// The matrices of a key head's value heads, on the way into the chunks: one after the other or two
// at once.
#ifndef KERNELS_CUDA_FUSED_PREFILL_IN_MATRICES_CUH_
#define KERNELS_CUDA_FUSED_PREFILL_IN_MATRICES_CUH_

#include "kernels/cuda/fused_prefill_in.cuh"
#include "kernels/cuda/fused_prefill_matrices_pair.cuh"

namespace gdn::cuda::chunk {

// The gates of the value heads from r on of those of a key head, a warp each.
template <typename X>
__device__ inline void FormNextGates(const InParams& p, const Item& item, int first_head, int r,
                                     InShared& shared, const Group& group) {
  const gdn_fused_decode_args& a = p.args.layer;
  const int lane = group.Lane();
  const int warp = group.Warp();
  if (warp < kSharedHeads && r + warp < p.ratio) {
    const int head = first_head + r + warp;
    const RawGates<X> raw = LoadGates<X>(a, item.chunk, head, lane);
    FormGates(raw, LoadGateWeights(a, head), a.beta_scale, p.scale, item.chunk.count, lane,
              &shared.solve.scalars[warp]);
  }
}

// Of a value head at its place among those of all slots, by one thread.
__device__ inline void StoreSolved(const InParams& p, int64_t at, const Triangle (&mix)[2],
                                   const InScalars& scalars) {
  BulkStore(p.mixes + at * int64_t{sizeof(mix)}, mix, sizeof(mix));
  BulkStore(p.scalars + at * int64_t{sizeof(WalkScalars)}, &scalars.walk, sizeof(WalkScalars));
}

// Keeps the compiler from widening products of keys outside of a loop, for which there is no room.
__device__ inline void KeepPacked(uint32_t (&kk)[16], uint32_t (&qk)[16]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) asm volatile("" : "+r"(kk[i]), "+r"(qk[i]));
}

template <typename X, int kStorer>
__device__ inline void DoMatricesSingly(const InParams& p, const Item& item, int first_head,
                                        uint32_t (&kk)[16], uint32_t (&qk)[16], InShared& shared,
                                        const Group& group) {
  const int lane = group.Lane();
  const int warp = group.Warp();
  PackedSystem& system = shared.solve.system;
#pragma unroll 1
  for (int r = 0; r < p.ratio; ++r) {
    // The tiles of this head: free once the keys, or the head before the last, are stored.
    if (group.thread == kStorer) {
      if (r == 0) {
        WaitForBulkReads<0>();
      } else {
        WaitForBulkReads<2>();
      }
    }
    group.Sync();
    if (r > 0 && r % kSharedHeads == 0) {
      if (group.thread == kStorer) WaitForBulkReads<0>();
      group.Sync();
      FormNextGates<X>(p, item, first_head, r, shared, group);
      group.Sync();
    }
    KeepPacked(kk, qk);
    const Triangle(&mix)[2] = shared.Mix(r);
    const TriangleTile t = {SharedAddress(&mix[0])};
    const InScalars& scalars = shared.solve.scalars[r % kSharedHeads];
    FormMatrices(scalars, system, t, {SharedAddress(&mix[1])}, warp, lane, kk, qk);
    __syncwarp();
    InvertDiagonal(system.diagonal[warp], t, warp, lane);
    group.Sync();
    MergeSixteens(system, t, warp, lane);
    group.Sync();
    MergeThirtyTwos(system, t, warp, lane);
    FenceForBulk();
    group.Sync();
    if (group.thread == kStorer) {
      StoreSolved(p, item.slot * p.args.layer.value_heads + first_head + r, mix, scalars);
    }
  }
}

// Of an odd last head the other one of its pair is made of what is there, and not stored.
template <typename X, int kStorer>
__device__ inline void DoMatricesInPairs(const InParams& p, const Item& item, int first_head,
                                         uint32_t (&kk)[16], uint32_t (&qk)[16], InShared& shared,
                                         const Group& group) {
  const int lane = group.Lane();
  const int warp = group.Warp();
  PackedSystem& first = shared.solve.system;
  PackedSystem& second = shared.solved.second;
#pragma unroll 1
  for (int r = 0; r < p.ratio; r += kSharedHeads) {
    const int heads = min(kSharedHeads, p.ratio - r);
    // Their place is free once the keys, or the heads before, are stored.
    if (group.thread == kStorer) WaitForBulkReads<0>();
    group.Sync();
    if (r > 0) {
      FormNextGates<X>(p, item, first_head, r, shared, group);
      group.Sync();
    }
#pragma unroll 1
    for (int h = 0; h < heads; ++h) {
      KeepPacked(kk, qk);
      const Triangle(&mix)[2] = shared.solved.mixes[h];
      FormMatrices(shared.solve.scalars[h], h == 0 ? first : second, {SharedAddress(&mix[0])},
                   {SharedAddress(&mix[1])}, warp, lane, kk, qk);
    }
    __syncwarp();
    const TriangleTile tiles[2] = {{SharedAddress(&shared.solved.mixes[0][0])},
                                   {SharedAddress(&shared.solved.mixes[1][0])}};
    InvertDiagonals(first.diagonal[warp], second.diagonal[warp], tiles, warp, lane);
    group.Sync();
    // A head a warp.
    const PackedSystem& system = warp % 2 == 0 ? first : second;
    const TriangleTile t = {warp % 2 == 0 ? tiles[0].address : tiles[1].address};
    MergeWholeSixteens(system, t, warp / 2 * 32, lane);
    group.Sync();
    MergeWholeThirtyTwos(system, t, warp / 2 * 16, lane);
    FenceForBulk();
    group.Sync();
    if (group.thread == kStorer) {
      for (int h = 0; h < heads; ++h) {
        StoreSolved(p, item.slot * p.args.layer.value_heads + first_head + r + h,
                    shared.solved.mixes[h], shared.solve.scalars[h]);
      }
    }
  }
}

// Once the keys are there and being stored.
template <typename X, typename Way>
__device__ inline void DoMatrices(const InParams& p, const Item& item, int key_head,
                                  InShared& shared, const Group& group) {
#ifdef GDN_WGMMA
  const int first_head = key_head * p.ratio;
  uint32_t kk[16];
  uint32_t qk[16];
  Grams(shared.panels[0], shared.panels[1], p.scale, kk, qk);
  if constexpr (Way::kPairs) {
    DoMatricesInPairs<X, Way::kStorer>(p, item, first_head, kk, qk, shared, group);
  } else {
    DoMatricesSingly<X, Way::kStorer>(p, item, first_head, kk, qk, shared, group);
  }
#endif
}

}  // namespace gdn::cuda::chunk

#endif  // KERNELS_CUDA_FUSED_PREFILL_IN_MATRICES_CUH_
