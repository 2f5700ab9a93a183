# Sources, tests and benchmarks of the recurrence family; included by CMakeLists.txt once the target
# gdn_kernels exists.

foreach(op IN ITEMS causal_conv delta_rule gates l2_norm)
  target_sources(gdn_kernels PRIVATE ref/${op}.cc cpu/${op}.cc capi/${op}.cc)
endforeach()

gdn_test(kernels_test
  SRCS
    causal_conv_test.cc
    cpu_pool_test.cc
    delta_rule_contract_test.cc
    delta_rule_test.cc
    gates_test.cc
    l2_norm_test.cc
    recurrence_misuse_test.cc
  DEPS gdn_kernels
  LABELS "unit;tsan"
  TIMEOUT 300)

gdn_bench(recurrence_bench SRCS bench/recurrence_bench.cc DEPS gdn_kernels)

# Every public header compiles on its own, as C and as C++: one translation unit each.
if(GDN_TESTS)
  set(header_units)
  foreach(name IN ITEMS causal_conv causal_conv_backward cpu_pool delta_rule delta_rule_backward
      delta_rule_forward delta_rule_saved embedding fused_decode fused_prefill gated_rms_norm
      gated_rms_norm_training gates gates_backward gdn2 gdn2_backward gdn2_gates gdn_kernels l2_norm
      l2_norm_backward linear matmul qk_norm_route rms_norm sampling silu_mul types)
    set(header gdn/kernels/${name}.h)
    foreach(extension IN ITEMS c cc)
      set(unit ${CMAKE_CURRENT_BINARY_DIR}/headers/${name}.${extension})
      file(CONFIGURE OUTPUT ${unit} CONTENT "#include \"@header@\"\n#include \"@header@\"\n" @ONLY)
      list(APPEND header_units ${unit})
    endforeach()
  endforeach()
  add_library(kernels_header_test OBJECT ${header_units})
  target_include_directories(kernels_header_test PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/include)
  set_target_properties(kernels_header_test PROPERTIES C_STANDARD 11 C_EXTENSIONS OFF)
  target_compile_options(kernels_header_test PRIVATE -Wall -Wextra -Wpedantic
    $<$<COMPILE_LANGUAGE:C>:-Wstrict-prototypes> $<$<BOOL:${GDN_WERROR}>:-Werror>)
endif()
