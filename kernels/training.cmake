# Sources and tests of the backward ops of the recurrence family and of GDN2; included by
# CMakeLists.txt once the target gdn_kernels exists.

foreach(op IN ITEMS causal_conv_backward gates_backward)
  target_sources(gdn_kernels PRIVATE ref/${op}.cc cpu/${op}.cc capi/${op}.cc)
endforeach()

gdn_test(kernels_training_test
  SRCS causal_conv_backward_test.cc gates_backward_test.cc
  DEPS gdn_kernels
  LABELS "unit;tsan" TIMEOUT 300)
