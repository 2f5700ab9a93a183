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

// kRows rows of a panel, kStep apart: a 16-byte vector each. Rows past the end become zeros.
template <int kRows, int kStep, typename X>
__device__ inline void CopyRows(uint32_t shared, const X* global, int64_t stride, int row,
                                int count) {
  static_assert(kStep % 8 == 0);  // Keeps the place of the vector in its row.
  const X* from = global + row * stride;
  if (count >= kChunk) {
#pragma unroll
    for (int i = 0; i < kRows; ++i, from += kStep * stride) {
      CopyAsync<16>(shared + i * kStep * kPanelRowBytes, from);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kRows; ++i, from += kStep * stride) {
      const bool inside = row + i * kStep < count;
      CopyOrZero(shared + i * kStep * kPanelRowBytes, inside ? from : global, inside);
    }
  }
}

template <typename X, int kStates>
__device__ inline void StartLoad(const Params& p, const Cursor& at, int thread,
                                 Shared<kStates>& shared, uint32_t slot, Gates* gates) {
  const gdn_delta_rule_args& a = p.args;
  const int64_t token = int64_t{at.begin} + at.first;
  const int count = at.length - at.first;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = thread % 32 + 32 * half;
    const int64_t gate = (token + i) * a.value_heads + at.head;
    gates->g[half] = i < count ? a.g[gate] : 0.0f;
    gates->beta[half] = i < count ? a.beta[gate] : 0.0f;
  }
  const int row = thread / 16;
  const int64_t column = at.head / p.ratio * kDim + thread % 16 * 8;
  const uint32_t place =
      thread % 16 / 8 * uint32_t{sizeof(Keys::k[0])} + PanelOffset(row, thread % 8);
  CopyRows<8, 8>(SharedAddress(shared.keys[slot].k) + place,
                 static_cast<const X*>(a.k) + token * a.k_token_stride + column, a.k_token_stride,
                 row, count);
  CopyRows<8, 8>(SharedAddress(shared.keys[slot].q) + place,
                 static_cast<const X*>(a.q) + token * a.q_token_stride + column, a.q_token_stride,
                 row, count);
  // 8 or 16 vectors of values a row.
  constexpr int kVectors = 8 * kStates;
  const int value_row = thread / kVectors;
  CopyRows<4 * kStates, kGroup / kVectors>(
      SharedAddress(shared.values[slot][thread % kVectors / 8]) +
          PanelOffset(value_row, thread % 8),
      static_cast<const X*>(a.v) + token * a.v_token_stride + at.head * kDim +
          at.part * kPanelColumns + thread % kVectors * 8,
      a.v_token_stride, value_row, count);
}

// Brings a tile's row, of which two neighbouring threads take half each, to unit norm, as FP16 in
// place. Returns the sum of its squares, and by what the row was multiplied. kKeep: the row stays
// in registers between its two uses.
template <typename X, bool kKeep>
__device__ inline float Normalize(uint16_t (&tile)[2][kPanelElements], int thread, float eps,
                                  float* factor) {
  char* const panel = reinterpret_cast<char*>(tile[thread % 2]);
  const auto at = [&](int i) {
    // The other half starts at the other end of the banks.
    return reinterpret_cast<uint4*>(panel + PanelOffset(thread / 2, i ^ thread % 2 * 4));
  };
  constexpr int kBatch = kKeep ? 8 : 4;
  uint4 raw[kBatch];
  float sums[4] = {};
#pragma unroll
  for (int first = 0; first < 8; first += kBatch) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) raw[i] = *at(first + i);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const uint32_t word[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 x = UnpackPair<X>(word[j]);
        sums[j] = fmaf(x.x, x.x, sums[j]);
        sums[j] = fmaf(x.y, x.y, sums[j]);
      }
    }
  }
  const float sum = LaneSum<1>((sums[0] + sums[1]) + (sums[2] + sums[3]));
  const float scale = sum + eps > 0.0f || sum != sum ? rsqrtf(sum + eps) : 0.0f;
#pragma unroll
  for (int first = 0; first < 8; first += kBatch) {
    if constexpr (!kKeep) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) raw[i] = *at(first + i);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      uint32_t word[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 x = UnpackPair<X>(word[j]);
        word[j] = PackHalves(x.x * scale, x.y * scale);
      }
      *at(first + i) = make_uint4(word[0], word[1], word[2], word[3]);
    }
  }
  *factor = scale;
  return sum;
}

// What the scalars of the thread's row, thread / 2, take from the gates.
struct Decay {
  float log_decay;
  float end;  // log_decay of the chunk's last row.
  float beta;
};
__device__ inline Decay SumGates(const Gates& gates, int thread) {
  float prefix[2];
  const float end = PrefixSums(gates.g, thread % 32, prefix);
  const bool late = thread >= kGroup / 2;
  const int source = thread / 2 % 32;
  Decay decay;
  decay.end = end;
  decay.log_decay = __shfl_sync(kFullMask, late ? prefix[1] : prefix[0], source);
  decay.beta = __shfl_sync(kFullMask, late ? gates.beta[1] : gates.beta[0], source);
  return decay;
}

template <typename X, bool kKeep>
__device__ inline void Prepare(const Params& p, const Decay& decay, int thread, Keys* keys,
                               Scalars* scalars) {
  const bool normalize = p.args.use_qk_l2norm != 0;
  const float eps = normalize ? kQkNormEps : 0.0f;
  const int row = thread / 2;
  float factor;
  const float key_sum = Normalize<X, kKeep>(keys->k, thread, eps, &factor);
  const float size = normalize ? 1.0f : key_sum * factor;
  const float query_sum = Normalize<X, kKeep>(keys->q, thread, eps, &factor);
  if (thread % 2 == 0) {
    const float from_start = DecayBetween(decay.log_decay, 0.0f);
    scalars->beta[row] = decay.beta;
    scalars->remembered[row] = decay.beta * from_start * size;
    scalars->decay[row] = from_start;
    scalars->to_end[row] = DecayBetween(decay.end, decay.log_decay) * size;
  } else {
    scalars->query[row] = normalize ? p.scale : p.scale * query_sum * factor;
    scalars->log_decay[row] = decay.log_decay;
    scalars->key_size[row] = size;
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

// The chunk's size of a key, 1 where keys are prepared.
__device__ inline float2 KeySizes(const Scalars& scalars, int column) {
  return *reinterpret_cast<const float2*>(&scalars.key_size[column]);
}
__device__ inline float KeySize(const Scalars& scalars, int row) { return scalars.key_size[row]; }

// P from the products of queries and keys, into a panel.
template <typename S>
__device__ inline void FormMix(const S& scalars, uint32_t tile, int warp, int lane,
                               const float (&d)[32]) {
  const int row = 16 * warp + lane / 4;
  const float log_decay[2] = {scalars.log_decay[row], scalars.log_decay[row + 8]};
#pragma unroll
  for (int t = 0; t < 8; t += 2) {
    uint32_t word[4] = {};
    // Blocks of 16: below the diagonal, on it, above it.
    if (t <= 2 * warp) {
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        const int column = 8 * (t + u) + lane % 4 * 2;
        const float2 earlier = *reinterpret_cast<const float2*>(&scalars.log_decay[column]);
        const float2 size = KeySizes(scalars, column);
#pragma unroll
        for (int v = 0; v < 2; ++v) {
          const int i = row + 8 * v;
          const float* from = &d[4 * (t + u) + 2 * v];
          float x = from[0] * DecayBetween(log_decay[v], earlier.x) * size.x;
          float y = from[1] * DecayBetween(log_decay[v], earlier.y) * size.y;
          if (t == 2 * warp) {
            if (column > i) x = 0.0f;
            if (column + 1 > i) y = 0.0f;
          }
          word[2 * u + v] = PackHalves(x, y);
        }
      }
    }
    const int matrix = lane / 8;
    StoreMatrices(tile + PanelOffset(16 * warp + lane % 8 + matrix % 2 * 8, t + matrix / 2),
                  word[0], word[1], word[2], word[3]);
  }
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
    const Decay decay = SumGates(gates, Opaque(thread));
    WaitForCopies<0>();
    NamedBarrier(kKeysBarrier, kGroup);
    Prepare<X, kStates == 1>(p, decay, Opaque(thread), &keys, &scalars);
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
    FormMix(scalars, SharedAddress(shared.mix[n % kSlots].p), warp, lane, d);
    FenceForBulk();
    shared.ready[n % kSlots].Arrive();
  }
}

}  // namespace gdn::cuda::chunk

#endif  // KERNELS_CUDA_DELTA_RULE_CHUNK_KEYS_CUH_
