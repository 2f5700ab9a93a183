# The linear op: both back ends, its tests and its benchmark; included by
# CMakeLists.txt after cuda.cmake.

target_sources(gdn_kernels PRIVATE
  capi/linear.cc capi/linear_argmax.cc ref/linear.cc ref/linear_argmax.cc)
gdn_test(kernels_linear_op_test SRCS linear_argmax_test.cc linear_op_test.cc DEPS gdn_kernels hwy::hwy)

if(NOT GDN_CUDA)
  return()
endif()
if(GDN_TESTS)
  target_compile_definitions(kernels_linear_op_test PRIVATE GDN_TEST_CUDA)
endif()

target_sources(gdn_kernels PRIVATE
  cuda/cublaslt_loader.cc cuda/linear.cc cuda/linear_argmax.cu cuda/linear_lt.cc cuda/linear_rows.cu
  cuda/linear_skinny.cu cuda/linear_tile.cu cuda/linear_wide.cu cuda/tensor_map.cc)
# Where the loader looks for cuBLASLt last.
set_source_files_properties(cuda/cublaslt_loader.cc PROPERTIES COMPILE_DEFINITIONS
  GDN_CUBLASLT_PATH="${CUDAToolkit_LIBRARY_DIR}/libcublasLt.so.13")
target_link_libraries(gdn_kernels PUBLIC ${CMAKE_DL_LIBS})
target_link_libraries(gdn_kernels_shared PRIVATE ${CMAKE_DL_LIBS})

gdn_test(kernels_linear_cuda_test SRCS cuda/linear_argmax_test.cc cuda/linear_test.cc DEPS gdn_kernels
  LABELS gpu TIMEOUT 300)

if(GDN_BENCH)
  add_executable(linear_cuda_bench bench/linear_cuda_bench.cu)
  target_include_directories(linear_cuda_bench PRIVATE ${PROJECT_SOURCE_DIR})
  target_compile_options(linear_cuda_bench PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:${GDN_CUDA_OPTIONS}>)
  target_link_libraries(linear_cuda_bench PRIVATE gdn_kernels CUDA::cublasLt)
endif()
