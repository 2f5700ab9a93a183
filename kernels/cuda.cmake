# The fused decode step, and the sources, tests and benchmarks of the CUDA back end; included by
# CMakeLists.txt once the target gdn_kernels exists.

target_sources(gdn_kernels PRIVATE
  capi/fused_decode.cc capi/fused_prefill.cc ref/fused_decode.cc ref/fused_prefill.cc)
gdn_test(kernels_fused_test SRCS fused_decode_test.cc fused_prefill_test.cc DEPS gdn_kernels)

if(NOT GDN_CUDA)
  return()
endif()

target_sources(gdn_kernels PRIVATE
  cuda/causal_conv.cu cuda/delta_rule.cu cuda/delta_rule_chunk.cu cuda/device.cc
  cuda/embedding.cu cuda/fused_decode.cu cuda/fused_prefill.cc cuda/fused_prefill_in.cu
  cuda/fused_prefill_out.cu cuda/fused_prefill_walk.cu
  cuda/fused_decode_128_bf16.cu cuda/fused_decode_128_f16.cu cuda/fused_decode_generic.cu
  cuda/gated_rms_norm.cu cuda/gates.cu cuda/l2_norm.cu cuda/rms_norm.cu
  cuda/sampling.cu cuda/sampling_choose.cu cuda/sampling_scan.cu cuda/silu_mul.cu)
target_compile_definitions(gdn_kernels PRIVATE GDN_HAS_CUDA)
# The chunked prefill uses instructions that only code for 90a has.
if("${CMAKE_CUDA_ARCHITECTURES}" MATCHES "90a")
  target_compile_definitions(gdn_kernels PRIVATE GDN_SM90A)
endif()
# -fmad=false: products and sums contract only where the source says fmaf, so that the same formula
# gives the same bits in every kernel. -lineinfo costs nothing and names source lines in profiles.
set(GDN_CUDA_OPTIONS -fmad=false -lineinfo -Xcompiler=-Wall,-Wextra)
if(GDN_WERROR)
  list(APPEND GDN_CUDA_OPTIONS -Werror=all-warnings -Xcompiler=-Werror)
endif()
target_compile_options(gdn_kernels PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:${GDN_CUDA_OPTIONS}>)
# Static: the libraries then need nothing but a driver on the machine they run on.
target_link_libraries(gdn_kernels PUBLIC CUDA::cudart_static)
target_link_libraries(gdn_kernels_shared PRIVATE CUDA::cudart_static)

gdn_test(kernels_cuda_test
  SRCS cuda/fused_decode_test.cc cuda/fused_decode_slots_test.cc cuda/fused_decode_bits_test.cc
       cuda/ops_bits_test.cc cuda/ops_test.cc
  DEPS gdn_kernels
  LABELS gpu TIMEOUT 300)
gdn_test(kernels_cuda_prefill_test
  SRCS cuda/delta_rule_chunk_test.cc cuda/fused_prefill_bits_test.cc cuda/fused_prefill_test.cc
  DEPS gdn_kernels
  LABELS gpu TIMEOUT 300)
gdn_test(kernels_cuda_dense_test
  SRCS cuda/embedding_test.cc cuda/sampling_bits_test.cc cuda/sampling_test.cc
       cuda/silu_mul_test.cc
  DEPS gdn_kernels hwy::hwy
  LABELS gpu TIMEOUT 300)

if(GDN_BENCH)
  foreach(bench IN ITEMS decode_bench prefill_bench sampling_bench)
    add_executable(${bench} bench/${bench}.cu)
    target_include_directories(${bench} PRIVATE ${PROJECT_SOURCE_DIR})
    target_compile_options(${bench} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:${GDN_CUDA_OPTIONS}>)
    target_link_libraries(${bench} PRIVATE gdn_kernels)
  endforeach()
  gdn_executable(drift_bench SRCS bench/drift_bench.cc DEPS gdn_kernels)
endif()
