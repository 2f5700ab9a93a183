// The keys role of the chunked delta rule: see delta_rule_chunk.cuh.
#ifndef KERNELS_CUDA_DELTA_RULE_CHUNK_KEYS_CUH_
#define KERNELS_CUDA_DELTA_RULE_CHUNK_KEYS_CUH_

#include "kernels/cuda/async_copy.cuh"
#include "kernels/cuda/delta_rule_chunk.cuh"

namespace gdn::cuda::chunk {

// What a thread fetches of a chunk's gates: tokens lane and lane + 32; zeros past the end.
struct Gates {
  float g[2];
  float beta[2];
};

template <typename X, int kStates>
__device__ inline void StartLoad(const Params& p, const Cursor& at, int thread,
                                 Shared<kStates>& shared, uint32_t slot, Gates* gates) {
  Keys* const keys = &shared.keys[slot];
  const gdn_delta_rule_args& a = p.args;
  const int64_t token = int64_t{at.begin} + at.first;
  const int count = at.length - at.first;
  const int64_t column = at.head / p.ratio * kDim + thread % 16 * 8;
  const X* const k = static_cast<const X*>(a.k) + token * a.k_token_stride + column;
  const X* const q = static_cast<const X*>(a.q) + token * a.q_token_stride + column;
  const uint32_t k_panel = SharedAddress(keys->k[thread % 16 / 8]);
  const uint32_t q_panel = SharedAddress(keys->q[thread % 16 / 8]);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = thread / 16 + 8 * i;
    const uint32_t offset = PanelOffset(row, thread % 8);
    const int64_t from = row < count ? row : 0;
    CopyOrZero(k_panel + offset, k + from * a.k_token_stride, row < count);
    CopyOrZero(q_panel + offset, q + from * a.q_token_stride, row < count);
  }
  // 8 or 16 vectors of values a row.
  constexpr int kVectors = 8 * kStates;
  const X* const v = static_cast<const X*>(a.v) + token * a.v_token_stride + at.head * kDim +
                     at.part * kPanelColumns + thread % kVectors * 8;
  const uint32_t v_panel = SharedAddress(shared.values[slot][thread % kVectors / 8]);
#pragma unroll
  for (int i = 0; i < 4 * kStates; ++i) {
    const int row = thread / kVectors + kGroup / kVectors * i;
    CopyOrZero(v_panel + PanelOffset(row, thread % 8),
               v + (row < count ? row : 0) * a.v_token_stride, row < count);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = thread % 32 + 32 * half;
    const int64_t gate = (token + i) * a.value_heads + at.head;
    gates->g[half] = i < count ? a.g[gate] : 0.0f;
    gates->beta[half] = i < count ? a.beta[gate] : 0.0f;
  }
}

// Brings one row of a tile to unit norm, as FP16 in place; returns the sum of its squares, and by
// what the row was multiplied.
template <typename X>
__device__ inline float Normalize(uint16_t (&tile)[2][kPanelElements], int row, float eps,
                                  float* factor) {
  const uint32_t panel = SharedAddress(tile[0]);
  constexpr uint32_t kPanelBytes = kPanelElements * 2;
  float sums[2] = {0.0f, 0.0f};
#pragma unroll 4
  for (int i = 0; i < 16; ++i) {
    uint32_t word[4];
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "r"(panel + i / 8 * kPanelBytes + PanelOffset(row, i % 8)));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 x = Pair<X>::Widen(*reinterpret_cast<typename Pair<X>::Raw*>(&word[j]));
      sums[0] = fmaf(x.x, x.x, sums[0]);
      sums[1] = fmaf(x.y, x.y, sums[1]);
    }
  }
  const float sum = sums[0] + sums[1];
  *factor = sum + eps > 0.0f || sum != sum ? rsqrtf(sum + eps) : 0.0f;
#pragma unroll 4
  for (int i = 0; i < 16; ++i) {
    const uint32_t address = panel + i / 8 * kPanelBytes + PanelOffset(row, i % 8);
    uint32_t word[4];
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "r"(address));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 x = Pair<X>::Widen(*reinterpret_cast<typename Pair<X>::Raw*>(&word[j]));
      word[j] = PackHalves(x.x * *factor, x.y * *factor);
    }
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(word[0]),
                 "r"(word[1]), "r"(word[2]), "r"(word[3])
                 : "memory");
  }
  return sum;
}

// Inclusive sum over the lanes of a warp.
__device__ inline float LanePrefix(float value, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float below = __shfl_up_sync(kFullMask, value, step);
    if (lane >= step) value += below;
  }
  return value;
}

// Threads 0..63 take a key each, 64..127 a query.
template <typename X>
__device__ inline void Prepare(const Params& p, const Gates& gates, int thread, Keys* keys,
                               Scalars* scalars) {
  constexpr float kLog2E = 1.4426950408889634f;
  constexpr float kForgotten = -160.0f;  // 2^this is 0 in FP32; bounds the sums' rounding error.
  const int lane = thread % 32;
  const int half = thread / 32 % 2;
  float prefix[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float g = gates.g[i] * kLog2E;
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(g) : "f"(kForgotten));
    prefix[i] = LanePrefix(g, lane);
  }
  const float middle = __shfl_sync(kFullMask, prefix[0], 31);
  const float end = middle + __shfl_sync(kFullMask, prefix[1], 31);
  const float log_decay = half == 0 ? prefix[0] : middle + prefix[1];
  const float beta = half == 0 ? gates.beta[0] : gates.beta[1];
  const bool normalize = p.args.use_qk_l2norm != 0;
  const float eps = normalize ? kQkNormEps : 0.0f;
  const int row = thread % kChunk;
  float factor;
  if (thread < kChunk) {
    const float sum = Normalize<X>(keys->k, row, eps, &factor);
    const float size = normalize ? 1.0f : sum * factor;
    const float decay = DecayBetween(log_decay, 0.0f);
    scalars->beta[row] = beta;
    scalars->remembered[row] = beta * decay * size;
    scalars->decay[row] = decay;
    scalars->to_end[row] = DecayBetween(end, log_decay) * size;
    scalars->log_decay[row] = log_decay;
    scalars->key_size[row] = size;
  } else {
    const float sum = Normalize<X>(keys->q, row, eps, &factor);
    scalars->query[row] = normalize ? p.scale : p.scale * sum * factor;
  }
}

// The products of 64 rows of a tile with 64 of another.
__device__ inline void Gram(const uint16_t (&rows)[2][kPanelElements],
                            const uint16_t (&columns)[2][kPanelElements], float (&d)[32]) {
  ProductFence();
#pragma unroll
  for (int panel = 0; panel < 2; ++panel) {
    const uint64_t a = PanelDescriptor(SharedAddress(rows[panel]));
    const uint64_t b = PanelDescriptor(SharedAddress(columns[panel]));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      ProductN64(d, a + i * kNextColumns, b + i * kNextColumns, panel + i > 0);
    }
  }
  CommitProducts();
  WaitForProducts<0>();
  Pin(d);
}

template <typename X, int kStates>
__device__ inline void KeysRole(const Params& p, Shared<kStates>& shared, int thread) {
  constexpr int kParts = 2 / kStates;
  Cursor at;
  if (!EnterChunks<kParts>(p, static_cast<int>(blockIdx.x), &at)) return;
  Gates gates;
  StartLoad<X>(p, at, thread, shared, 0, &gates);
  CommitCopies();
  bool more = true;
  for (uint32_t n = 0; more; ++n) {
    const int lane = Opaque(thread) % 32;
    const int warp = Opaque(thread) / 32;
    Keys& keys = shared.keys[n % kSlots];
    Scalars& scalars = shared.scalars[n % kSlots];
    WaitForCopies<0>();
    NamedBarrier(kKeysBarrier, kGroup);
    Prepare<X>(p, gates, thread, &keys, &scalars);
    FenceForBulk();
    shared.loaded[n % kSlots].Arrive();
    NamedBarrier(kKeysBarrier, kGroup);
    more = NextChunk<kParts>(p, &at);
    // The slot of the chunk after this one is that of the chunk two before.
    if (n >= 2) WaitFor(shared.done, n - 2);
    if (more) StartLoad<X>(p, at, Opaque(thread), shared, (n + 1) % kSlots, &gates);
    CommitCopies();
    float d[32];
    Gram(keys.q, keys.k, d);
    const uint32_t tile = SharedAddress(shared.mix[n % kSlots].p);
    const int row = 16 * warp + lane / 4;
    const float log_decay[2] = {scalars.log_decay[row], scalars.log_decay[row + 8]};
#pragma unroll
    for (int t = 0; t < 8; t += 2) {
      uint32_t word[4];
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        const int column = 8 * (t + u) + lane % 4 * 2;
        const float2 earlier = *reinterpret_cast<const float2*>(&scalars.log_decay[column]);
        const float2 size = *reinterpret_cast<const float2*>(&scalars.key_size[column]);
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          const int i = row + 8 * v;
          const float* from = &d[4 * (t + u) + 2 * v];
          const float x = from[0] * DecayBetween(log_decay[v], earlier.x) * size.x;
          const float y = from[1] * DecayBetween(log_decay[v], earlier.y) * size.y;
          word[2 * u + v] = PackHalves(column <= i ? x : 0.0f, column + 1 <= i ? y : 0.0f);
        }
      }
      const int matrix = lane / 8;
      StoreMatrices(tile + PanelOffset(16 * warp + lane % 8 + matrix % 2 * 8, t + matrix / 2),
                    word[0], word[1], word[2], word[3]);
    }
    FenceForBulk();
    shared.ready[n % kSlots].Arrive();
  }
}

}  // namespace gdn::cuda::chunk

#endif  // KERNELS_CUDA_DELTA_RULE_CHUNK_KEYS_CUH_
