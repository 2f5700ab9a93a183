# Sources, tests and benchmarks of the dense ops; included by CMakeLists.txt once the target
# gdn_kernels exists.

# oneDNN runs on libgomp; its thread count is set to one on the threads that call it.
find_library(GDN_GOMP NAMES gomp libgomp.so.1 REQUIRED)

foreach(op IN ITEMS embedding gated_rms_norm matmul rms_norm sampling silu_mul)
  target_sources(gdn_kernels PRIVATE ref/${op}.cc cpu/${op}.cc capi/${op}.cc)
endforeach()
target_sources(gdn_kernels PRIVATE
  cpu/matmul_onednn.cc cpu/matmul_panels.cc cpu/matmul_tile.cc cpu/sampling_scan.cc)
target_link_libraries(gdn_kernels PRIVATE ${GDN_GOMP})
target_link_libraries(gdn_kernels_shared PRIVATE ${GDN_GOMP})

gdn_test(kernels_linear_test
  SRCS embedding_test.cc gated_rms_norm_test.cc matmul_onednn_test.cc matmul_test.cc
       philox_test.cc rms_norm_test.cc sampling_test.cc silu_mul_test.cc
  DEPS gdn_kernels hwy::hwy ${GDN_GOMP}
  LABELS "unit;tsan" TIMEOUT 300)
gdn_bench(kernels_linear_bench SRCS bench/linear_bench.cc DEPS gdn_kernels)
