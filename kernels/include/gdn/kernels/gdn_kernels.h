/*! \file gdn_kernels.h
 *  \brief The C ABI of libgdn_kernels: every op of the library. See types.h for the common
 *  contract.
 */
#ifndef GDN_KERNELS_GDN_KERNELS_H_
#define GDN_KERNELS_GDN_KERNELS_H_

#include "gdn/kernels/causal_conv.h"
#include "gdn/kernels/causal_conv_backward.h"
#include "gdn/kernels/cpu_pool.h"
#include "gdn/kernels/delta_rule.h"
#include "gdn/kernels/delta_rule_backward.h"
#include "gdn/kernels/delta_rule_forward.h"
#include "gdn/kernels/delta_rule_saved.h"
#include "gdn/kernels/embedding.h"
#include "gdn/kernels/fused_decode.h"
#include "gdn/kernels/fused_prefill.h"
#include "gdn/kernels/gated_rms_norm.h"
#include "gdn/kernels/gated_rms_norm_training.h"
#include "gdn/kernels/gates.h"
#include "gdn/kernels/gates_backward.h"
#include "gdn/kernels/gdn2.h"
#include "gdn/kernels/gdn2_backward.h"
#include "gdn/kernels/gdn2_gates.h"
#include "gdn/kernels/l2_norm.h"
#include "gdn/kernels/l2_norm_backward.h"
#include "gdn/kernels/linear.h"
#include "gdn/kernels/linear_argmax.h"
#include "gdn/kernels/matmul.h"
#include "gdn/kernels/qk_norm_route.h"
#include "gdn/kernels/rms_norm.h"
#include "gdn/kernels/sampling.h"
#include "gdn/kernels/silu_mul.h"
#include "gdn/kernels/types.h"

#endif /* GDN_KERNELS_GDN_KERNELS_H_ */
