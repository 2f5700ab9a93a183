# Sources, tests and benchmarks of the dense ops; included by CMakeLists.txt once the target
# gdn_kernels exists:
#   target_sources(gdn_kernels PRIVATE ref/x.cc cpu/x.cc capi/x.cc)
#   gdn_test(...)  gdn_bench(...)
