# Sources, tests and benchmarks of the dense ops; included by CMakeLists.txt.
list(APPEND GDN_KERNELS_SOURCES)
