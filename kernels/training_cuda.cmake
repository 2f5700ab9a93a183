# The CUDA back end of what training adds to the ops, but for the rule's, with its tests and its
# benchmark; included by CMakeLists.txt after cuda.cmake.

if(NOT GDN_CUDA)
  return()
endif()

target_sources(gdn_kernels PRIVATE
  cuda/causal_conv_backward.cu cuda/gated_rms_norm_backward.cu cuda/gated_rms_norm_forward.cu
  cuda/gates_backward.cu cuda/l2_norm_backward.cu)

# The bodies of the host's tests, and what only a GPU can be asked.
gdn_test(kernels_cuda_training_test
  SRCS
    causal_conv_backward_test.cc
    cuda/training_bits_test.cc
    cuda/training_large_test.cc
    gated_rms_norm_fp8_test.cc
    gated_rms_norm_gradient_test.cc
    gated_rms_norm_layout_test.cc
    gated_rms_norm_misuse_test.cc
    gated_rms_norm_precision_test.cc
    gated_rms_norm_training_test.cc
    gates_backward_test.cc
    l2_norm_backward_test.cc
    l2_norm_precision_test.cc
    qk_norm_route_test.cc
  DEPS gdn_kernels hwy::hwy
  LABELS gpu TIMEOUT 300)
if(GDN_TESTS)
  target_compile_definitions(kernels_cuda_training_test PRIVATE GDN_TEST_CUDA)
endif()

if(GDN_BENCH)
  add_executable(norm_bench bench/norm_bench.cu)
  target_include_directories(norm_bench PRIVATE ${PROJECT_SOURCE_DIR})
  target_compile_options(norm_bench PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:${GDN_CUDA_OPTIONS}>)
  target_link_libraries(norm_bench PRIVATE gdn_kernels)
endif()
