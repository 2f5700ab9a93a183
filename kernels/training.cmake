# Sources and tests of what training adds to the ops; included by CMakeLists.txt once the target
# gdn_kernels exists.

foreach(op IN ITEMS gated_rms_norm_training l2_norm_backward qk_norm_route)
  target_sources(gdn_kernels PRIVATE capi/${op}.cc)
endforeach()
foreach(op IN ITEMS gated_rms_norm_training l2_norm_backward)
  target_sources(gdn_kernels PRIVATE ref/${op}.cc cpu/${op}.cc)
endforeach()

gdn_test(kernels_training_test
  SRCS
    far_rows_test.cc
    fp8_test.cc
    gated_rms_norm_fp8_test.cc
    gated_rms_norm_gradient_test.cc
    gated_rms_norm_layout_test.cc
    gated_rms_norm_misuse_test.cc
    gated_rms_norm_precision_test.cc
    gated_rms_norm_training_test.cc
    l2_norm_backward_test.cc
    l2_norm_precision_test.cc
    qk_norm_route_test.cc
  DEPS gdn_kernels hwy::hwy
  LABELS "unit;tsan"
  TIMEOUT 300)
