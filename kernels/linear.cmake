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
