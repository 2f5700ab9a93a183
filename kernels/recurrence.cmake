# Sources, tests and benchmarks of the recurrence family; included by CMakeLists.txt once the target
# gdn_kernels exists.

target_sources(gdn_kernels PRIVATE
  capi/causal_conv.cc capi/delta_rule.cc capi/gates.cc capi/l2_norm.cc
  cpu/causal_conv.cc cpu/delta_rule.cc cpu/gates.cc cpu/l2_norm.cc
  ref/causal_conv.cc ref/delta_rule.cc ref/gates.cc ref/l2_norm.cc
)

gdn_test(kernels_test
  SRCS delta_rule_test.cc
  DEPS gdn_kernels)
