#include "kernels/cuda/delta_rule_chunk.cuh"
#include "kernels/cuda/fused_prefill.h"

// The way into the chunks. A block takes a chunk's slot and a few heads of q, k or v in turn; a
// warp 16 of the chunk's tokens, a lane four channels, so that a token's head is a warp's.

namespace gdn::cuda {
namespace {

using namespace chunk;  // NOLINT(build/namespaces)

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kRows = kChunk / kWarps;
constexpr int kBatch = 8;  // Of those, in flight.
constexpr int kHeads = 4;  // Of a block; a warp forms the gates of one of them.
constexpr int kPast = 3;
constexpr int kQuad = 4;

struct InParams {
  gdn_fused_prefill_args args;
  char* keys;
  char* values;
  char* scalars;
};

template <typename X>
struct alignas(8) Quad {
  X element[kQuad];
};
template <typename X>
__device__ inline Quad<X> LoadQuad(const X* from) {
  return *reinterpret_cast<const Quad<X>*>(from);
}
template <typename X>
__device__ inline void Push(float (&window)[kPast][kQuad], const Quad<X>& now) {
#pragma unroll
  for (int e = 0; e < kQuad; ++e) {
    window[0][e] = window[1][e];
    window[1][e] = window[2][e];
    window[2][e] = Widen(now.element[e]);
  }
}

// One head's columns of the projection, and where its chunk goes.
template <typename X>
struct Head {
  const X* x;       // The lane's columns.
  int64_t channel;  // The same in the convolution's order.
  char* tile;       // Panels of the chunk.
  bool is_value;
};

template <typename X>
__device__ inline Head<X> HeadAt(const InParams& p, int64_t slot, int row, int lane) {
  const gdn_fused_decode_args& a = p.args.layer;
  const int keys = static_cast<int>(a.key_heads);
  const X* const x = static_cast<const X*>(a.x);
  constexpr int64_t kTile = sizeof(Keys::k);
  Head<X> head;
  head.channel = int64_t{row} * kDim + lane * kQuad;
  head.is_value = row >= 2 * keys;
  if (head.is_value) {
    const int value_head = row - 2 * keys;
    head.x = x + a.v_offset + value_head * kDim;
    head.tile = p.values + (slot * a.value_heads + value_head) * kTile;
  } else {
    const int key_head = row % keys;
    const bool is_query = row < keys;
    head.x = x + (is_query ? a.q_offset : a.k_offset) + key_head * kDim;
    head.tile = p.keys + ((slot * keys + key_head) * 2 + (is_query ? 1 : 0)) * kTile;
  }
  head.x += lane * kQuad;
  return head;
}

// The last kPast inputs before the sequence, and after it.
template <typename X>
__device__ inline void CarryState(const gdn_fused_decode_args& a, const SlotChunk& chunk,
                                  const Head<X>& head, float (&window)[kPast][kQuad]) {
  const int64_t channels = (2 * a.key_heads + a.value_heads) * kDim;
  X* const state = static_cast<X*>(a.conv_state) + head.channel;
  const int64_t read = a.read_index[chunk.sequence];
  const int64_t write = a.write_index[chunk.sequence];
  const bool fresh = a.fresh != nullptr && a.fresh[chunk.sequence] != 0;
  if (!fresh) {
#pragma unroll
    for (int j = 0; j < kPast; ++j) {
      Push(window, LoadQuad(state + read * a.conv_slot_stride + j * channels));
    }
  }
  if (chunk.length == 0 && read == write) return;
#pragma unroll
  for (int j = 0; j < kPast; ++j) {
    // Entry j is input length - kPast + j, or where the sequence is shorter an old entry.
    Quad<X> entry;
    if (chunk.length + j >= kPast) {
      entry = LoadQuad(head.x + (chunk.begin + chunk.length - kPast + j) * a.x_token_stride);
    } else {
#pragma unroll
      for (int e = 0; e < kQuad; ++e) {
        float old = window[j][e];
        if (chunk.length == 1) old = window[j + 1 < kPast ? j + 1 : j][e];
        if (chunk.length == 2) old = window[j + 2 < kPast ? j + 2 : j][e];
        entry.element[e] = Narrow<X>(old);
      }
    }
    *reinterpret_cast<Quad<X>*>(state + write * a.conv_slot_stride + j * channels) = entry;
  }
}

// The warp's tokens of one head.
template <typename X>
__device__ inline void Convolve(const InParams& p, const SlotChunk& chunk, const Head<X>& head,
                                int warp, int lane) {
  const gdn_fused_decode_args& a = p.args.layer;
  const int first = warp * kRows;
  const int count = chunk.count - first;
  float window[kPast][kQuad] = {};
  if (chunk.first + first == 0) {
    CarryState(a, chunk, head, window);
  } else if (count > 0) {
#pragma unroll
    for (int j = 0; j < kPast; ++j) {
      Push(window, LoadQuad(head.x + (chunk.begin + first - kPast + j) * a.x_token_stride));
    }
  }
  float weight[kPast + 1][kQuad];
#pragma unroll
  for (int e = 0; e < kQuad; ++e) {
    const float4 w = reinterpret_cast<const float4*>(a.conv_weight)[head.channel + e];
    weight[0][e] = w.x;
    weight[1][e] = w.y;
    weight[2][e] = w.z;
    weight[3][e] = w.w;
  }
#pragma unroll 1
  for (int batch = 0; batch < kRows; batch += kBatch) {
    Quad<X> now[kBatch];
#pragma unroll
    for (int r = 0; r < kBatch; ++r) {
      const int64_t token = chunk.begin + first + batch + r;
      if (batch + r < count) now[r] = LoadQuad(head.x + token * a.x_token_stride);
    }
#pragma unroll
    for (int r = 0; r < kBatch; ++r) {
      uint2 word = make_uint2(0, 0);
      if (batch + r < count) {
        float y[kQuad];
        Quad<X> rounded;
#pragma unroll
        for (int e = 0; e < kQuad; ++e) {
          float sum = fmaf(weight[0][e], window[0][e], 0.0f);
          sum = fmaf(weight[1][e], window[1][e], sum);
          sum = fmaf(weight[2][e], window[2][e], sum);
          sum = fmaf(weight[3][e], Widen(now[r].element[e]), sum);
          rounded.element[e] = Narrow<X>(Silu(sum));
          y[e] = Widen(rounded.element[e]);
        }
        Push(window, now[r]);
        if (head.is_value) {
          word = *reinterpret_cast<const uint2*>(&rounded);
        } else {
          float squares = 0.0f;
#pragma unroll
          for (int e = 0; e < kQuad; ++e) squares = fmaf(y[e], y[e], squares);
          const float factor = rsqrtf(LaneSum(squares) + kQkNormEps);
          word = make_uint2(PackHalves(y[0] * factor, y[1] * factor),
                            PackHalves(y[2] * factor, y[3] * factor));
        }
      }
      const uint32_t offset = lane / 16 * uint32_t{kPanelElements * 2} +
                              PanelOffset(first + batch + r, lane / 2 % 8) + lane % 2 * 8;
      *reinterpret_cast<uint2*>(head.tile + offset) = word;
    }
  }
}

// The scalars of a value head's chunk.
template <typename X>
__device__ inline void FormGates(const InParams& p, const SlotChunk& chunk, int64_t slot, int head,
                                 int lane) {
  const gdn_fused_decode_args& a = p.args.layer;
  float g[2];
  float beta[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = lane + 32 * half;
    const X* const line = static_cast<const X*>(a.x) + (chunk.begin + i) * a.x_token_stride + head;
    g[half] = beta[half] = 0.0f;
    if (i < chunk.count) {
      g[half] = LogDecay(Widen(line[a.a_offset]), a.dt_bias[head], a.a_log[head]);
      beta[half] = WriteStrength(Widen(line[a.b_offset]), a.beta_scale);
    }
  }
  float prefix[2];
  const float end = PrefixSums(g, lane, prefix);
  UnitScalars* const to = reinterpret_cast<UnitScalars*>(p.scalars) + slot * a.value_heads + head;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = lane + 32 * half;
    const float decay = DecayBetween(prefix[half], 0.0f);
    to->beta[i] = beta[half];
    to->remembered[i] = beta[half] * decay;
    to->decay[i] = decay;
    to->to_end[i] = DecayBetween(end, prefix[half]);
    to->log_decay[i] = prefix[half];
  }
}

template <typename X>
__global__ void __launch_bounds__(kThreads, 5) InKernel(const __grid_constant__ InParams p) {
  const gdn_fused_decode_args& a = p.args.layer;
  const int64_t slot = blockIdx.x;
  SlotChunk chunk;
  if (!ChunkOfSlot(p.args.cu_seqlens, a.rows, slot, &chunk)) return;
  if (a.read_index[chunk.sequence] < 0 || a.write_index[chunk.sequence] < 0) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int rows = static_cast<int>(2 * a.key_heads + a.value_heads);
  const int first = static_cast<int>(blockIdx.y) * kHeads;
  const int value_head = first + warp - static_cast<int>(2 * a.key_heads);
  if (value_head >= 0 && value_head < a.value_heads) {
    FormGates<X>(p, chunk, slot, value_head, lane);
  }
  for (int row = first; row < first + kHeads && row < rows; ++row) {
    Convolve(p, chunk, HeadAt<X>(p, slot, row, lane), warp, lane);
  }
}

}  // namespace

void LaunchWayIn(const gdn_fused_prefill_args& args, const PreparedChunks& chunks,
                 cudaStream_t stream) {
  const gdn_fused_decode_args& a = args.layer;
  InParams p;
  p.args = args;
  p.keys = static_cast<char*>(chunks.keys);
  p.values = static_cast<char*>(chunks.values);
  p.scalars = static_cast<char*>(chunks.scalars);
  const int64_t rows = 2 * a.key_heads + a.value_heads;
  const dim3 grid(static_cast<unsigned>(ChunkSlots(args.tokens, a.rows)),
                  static_cast<unsigned>((rows + kHeads - 1) / kHeads));
  if (a.dtype == GDN_BF16) {
    InKernel<Bf16><<<grid, kThreads, 0, stream>>>(p);
  } else {
    InKernel<F16><<<grid, kThreads, 0, stream>>>(p);
  }
}

}  // namespace gdn::cuda
