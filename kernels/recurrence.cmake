# Sources, tests and benchmarks of the recurrence family; included by CMakeLists.txt.
list(APPEND GDN_KERNELS_SOURCES)
