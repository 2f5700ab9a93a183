# Sources, tests and benchmarks of the recurrence family; included by CMakeLists.txt once the target
# gdn_kernels exists.
