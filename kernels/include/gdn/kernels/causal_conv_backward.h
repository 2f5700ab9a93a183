/*! \file causal_conv_backward.h
 *  \brief Gradients of the depthwise causal convolution with carried state.
 *
 *  Forward, per sequence of L tokens and channel c, with the column X of the carried state's W-1
 *  inputs followed by the tokens (X[-W+1] .. X[L-1]):
 *      p[t] = bias + sum_{j<W} weight[j] * X[t-W+1+j],   y[t] = act(p[t]),  act = SiLU or identity
 *      final state = X[L-W+1] .. X[L-1]
 *  Backward, p being computed again from X:
 *      dp[t]     = d_y[t] * act'(p[t]),   SiLU' = s * (1 + p * (1 - s)),  s = sigmoid(p)
 *      dX[i]     = sum_{j<W} weight[j] * dp[i+W-1-j]  (terms with 0 <= i+W-1-j < L)
 *                  + d_final_state[i-L+W-1]  where i >= L-W+1
 *      d_weight[j] = sum over sequences and t of dp[t] * X[t-W+1+j],  d_bias = sum of dp[t]
 *  dX[0..L-1] is d_x, dX[-W+1..-1] is d_initial_state. FP32 (REF: FP64), one rounding on the store;
 *  sums over tokens have a fixed order that depends on the shape alone, without atomics: repeats
 * are bit-equal.
 *
 *  Sequences are packed: sequence i covers tokens [cu_seqlens[i], cu_seqlens[i+1]); no term crosses
 *  a boundary. Without tokens d_initial_state is d_final_state and d_weight, d_bias get nothing.
 *  Outputs are overwritten, not added to. Tokens from cu_seqlens[N] on are neither read nor
 *  written. No output may overlap an input or another output.
 *
 *  Back ends: REF, CPU, CUDA. With CUDA cu_seqlens lies on the device and is not checked, and x,
 *  weight, d_y and d_x are wanted even if all sequences are empty. CUDA is fastest with width 4,
 * one 16-bit type for x, d_y and d_x, and even channels and strides.
 */
#ifndef GDN_KERNELS_CAUSAL_CONV_BACKWARD_H_
#define GDN_KERNELS_CAUSAL_CONV_BACKWARD_H_

#include "gdn/kernels/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gdn_causal_conv_backward_args {
  int64_t sequences;         /*!< N >= 0. */
  const int32_t* cu_seqlens; /*!< [in] [N+1], non-decreasing from 0. */
  int64_t channels;          /*!< C >= 1. */
  int32_t width;             /*!< W in 2..8. */
  int32_t silu;              /*!< Non-zero: the forward had SiLU after the sum. */
  const void* x;             /*!< [in] [T, C] raw inputs of the forward, channels dense. */
  gdn_dtype x_dtype;
  int64_t x_token_stride;    /*!< >= C. */
  const float* weight;       /*!< [in] [C, W] dense, tap W-1 meets the newest token. */
  const float* bias;         /*!< [in] [C], or NULL: none. */
  const void* initial_state; /*!< [in] [N, W-1, C] dense, oldest first, type of x; NULL: zeros. */
  const void* d_y;           /*!< [in] [T, C], channels dense. */
  gdn_dtype d_y_dtype;
  int64_t d_y_token_stride;   /*!< >= C. */
  const float* d_final_state; /*!< [in] [N, W-1, C] dense, or NULL: zeros. */
  void* d_x;                  /*!< [out] [T, C], channels dense. */
  gdn_dtype d_x_dtype;
  int64_t d_x_token_stride; /*!< >= C. */
  float* d_weight;          /*!< [out] [C, W] dense. */
  float* d_bias;            /*!< [out] [C], or NULL: not wanted. */
  float* d_initial_state;   /*!< [out] [N, W-1, C] dense, or NULL: not wanted. */
} gdn_causal_conv_backward_args;

gdn_status gdn_causal_conv_backward(const gdn_exec* exec,
                                    const gdn_causal_conv_backward_args* args);

/*! \brief Scratch bytes of the call above: partial sums (CUDA). Pointers in args are not read. */
gdn_status gdn_causal_conv_backward_workspace(const gdn_exec* exec,
                                              const gdn_causal_conv_backward_args* args,
                                              size_t* bytes);

#ifdef __cplusplus
} /* extern "C" */
namespace gdn::ref {
gdn_status CausalConvBackward(const gdn_exec&, const gdn_causal_conv_backward_args&);
}
namespace gdn::cpu {
gdn_status CausalConvBackward(const gdn_exec&, const gdn_causal_conv_backward_args&);
}
namespace gdn::cuda {
gdn_status CausalConvBackward(const gdn_exec&, const gdn_causal_conv_backward_args&);
size_t CausalConvBackwardWorkspace(const gdn_causal_conv_backward_args&);
}  // namespace gdn::cuda
#endif
#endif /* GDN_KERNELS_CAUSAL_CONV_BACKWARD_H_ */
