# Sources and tests of the backward ops of the recurrence family and of GDN2; included by
# CMakeLists.txt once the target gdn_kernels exists.

foreach(op IN ITEMS causal_conv_backward delta_rule_backward delta_rule_forward gates_backward gdn2
    gdn2_backward gdn2_gates)
  target_sources(gdn_kernels PRIVATE ref/${op}.cc cpu/${op}.cc capi/${op}.cc)
endforeach()
target_sources(gdn_kernels PRIVATE capi/delta_rule_saved.cc)

gdn_test(kernels_rule_training_test
  SRCS causal_conv_backward_test.cc delta_rule_backward_test.cc
       delta_rule_training_contract_test.cc gates_backward_test.cc gdn2_backward_test.cc
       gdn2_gates_test.cc gdn2_test.cc rule_numerics_test.cc rule_requests_test.cc
  DEPS gdn_kernels
  LABELS "unit;tsan" TIMEOUT 300)

if(GDN_CUDA)
  target_sources(gdn_kernels PRIVATE
    cuda/delta_rule_backward.cu cuda/delta_rule_backward_chunk.cu cuda/delta_rule_forward.cu cuda/gdn2.cu cuda/gdn2_backward.cu
    cuda/gdn2_chunk.cu cuda/gdn2_gates.cu cuda/gdn2_gates_backward.cu)
  # The CPU's tests on a GPU, where their bodies hold CUDA against REF.
  gdn_test(kernels_cuda_rule_training_test
    SRCS delta_rule_backward_test.cc delta_rule_training_contract_test.cc gdn2_backward_test.cc
         gdn2_gates_test.cc gdn2_test.cc rule_numerics_test.cc rule_requests_test.cc
         cuda/delta_rule_backward_chunk_test.cc cuda/gdn2_chunk_test.cc cuda/rule_bits_test.cc
         cuda/rule_strides_test.cc cuda/rule_training_environment.cc
    DEPS gdn_kernels
    LABELS gpu TIMEOUT 300 PREFIX Cuda.)
  if(GDN_BENCH)
    add_executable(training_bench bench/training_bench.cu)
    target_include_directories(training_bench PRIVATE ${PROJECT_SOURCE_DIR})
    target_link_libraries(training_bench PRIVATE gdn_kernels)
  endif()
endif()
