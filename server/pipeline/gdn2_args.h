// File: gdn2_args.h
//
// The ops of a gdn2 layer, on either device: which columns of its buffers they take. The projection
// is q|k|v|z|f|b|w, the convolution's output q|k|v; the gates belong to the key heads.
#ifndef SERVER_PIPELINE_GDN2_ARGS_H_
#define SERVER_PIPELINE_GDN2_ARGS_H_

#include <cstddef>
#include <cstdint>

#include "gdn/kernels/gdn2.h"
#include "gdn/kernels/gdn2_gates.h"
#include "gdn/kernels/qk_norm_route.h"
#include "server/model/model_spec.h"

namespace gdn::pipeline {

// Without the number of tokens, the layer's vectors and the outputs.
gdn2_gates_args Gdn2GatesArgs(const model::ModelSpec& spec, const void* projection, gdn_dtype dtype,
                              int64_t projection_stride);

// The caller's side of the norm, which is the only one.
gdn_qk_norm_prepare_args Gdn2QkNormArgs(const model::ModelSpec& spec, int64_t tokens,
                                        void* conv_out, gdn_dtype dtype, int64_t conv_stride);
// gdn_qk_norm_prepare as an op of two arguments.
gdn_status Gdn2QkNorm(const gdn_exec* exec, const gdn_qk_norm_prepare_args* args);

// Without sequences, gates, states and output.
gdn2_args Gdn2Args(const model::ModelSpec& spec, const void* conv_out, gdn_dtype dtype,
                   int64_t conv_stride);

}  // namespace gdn::pipeline

#endif  // SERVER_PIPELINE_GDN2_ARGS_H_
