// What the fused decode kernels and their launcher share.
#ifndef KERNELS_CUDA_FUSED_DECODE_CUH_
#define KERNELS_CUDA_FUSED_DECODE_CUH_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "gdn/kernels/fused_decode.h"
#include "kernels/cuda/decode_tiling.h"

namespace gdn::cuda {

constexpr int kMaxDecodeTokens = 8;

// Parameters of the generic kernel.
struct GenericDecodeParams {
  gdn_fused_decode_args args;
  int64_t channels;  // Of the convolution: 2*H*K + HV*V.
  float scale;       // Never 0.
  int32_t ratio;     // HV / H.
};

// Parameters of the kernels for K = V = 128, W = 4: packed, and in the order of their first use,
// since each cache line of them that is touched costs a miss at the start of every launch.
struct DecodeParams {
  const int64_t* read_index;
  const int64_t* write_index;
  const uint8_t* fresh;
  void* state;
  int64_t state_slot_stride;
  void* conv_state;
  int64_t conv_slot_stride;
  int32_t channels;  // Of the convolution: 2*H*K + HV*V.
  int32_t ratio;     // HV / H.

  const float* conv_weight;
  const void* x;
  int64_t x_token_stride;
  int32_t q_offset;
  int32_t k_offset;
  int32_t v_offset;
  int32_t z_offset;
  int32_t b_offset;
  int32_t a_offset;
  uint32_t rows;
  uint32_t key_heads;
  const float* a_log;
  const float* dt_bias;
  const float* norm_weight;
  void* y;
  int64_t y_token_stride;
  float beta_scale;
  float scale;  // Never 0.
  float eps;
  uint32_t first_rows;  // Whole heads: the rows of the blocks that run first, all at once.
  int32_t multiprocessors;
  int8_t tokens;
  int8_t early_start;
  int8_t use_qk_l2norm;
  int8_t zero_centered;
  int8_t sigmoid_gate;
  int8_t round_o;
  int8_t round_before_gate;
};

// Grid y and z together count rows: y alone ends at 65535.
constexpr int64_t kMaxGridY = 65535;

// One translation unit per activation type.
template <typename X>
cudaError_t LaunchDecode128(const DecodeParams& params, gdn_dtype state_dtype, int tiling,
                            cudaStream_t stream);
template <typename X>
cudaError_t LaunchDecodeGeneric(const GenericDecodeParams& params, cudaStream_t stream);

}  // namespace gdn::cuda

#endif  // KERNELS_CUDA_FUSED_DECODE_CUH_
