# Compiler-wide settings: language level, build type, ccache, sanitizers, CUDA.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

# An unset build type means -O0 without NDEBUG, which nobody asks for.
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "" FORCE)
endif()

find_program(GDN_CCACHE ccache)
if(GDN_CCACHE)
  set(CMAKE_C_COMPILER_LAUNCHER ${GDN_CCACHE})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${GDN_CCACHE})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${GDN_CCACHE})
endif()

if(GDN_SANITIZE)
  add_compile_options(-fsanitize=${GDN_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${GDN_SANITIZE})
  # GCC 12 takes the branches of a switch over element types for reads beyond a 2-byte buffer once the
  # sanitizer keeps it from seeing which type it is.
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-Wno-array-bounds>)
  endif()
endif()

if(GDN_FUZZ)
  # The libraries are instrumented too, or the fuzzer sees no coverage.
  add_compile_options(-fsanitize=fuzzer-no-link)
endif()

find_package(Threads REQUIRED)

if(GDN_CUDA)
  # Architectures are explicit: 'native' is a configure error on a machine without a GPU.
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 90a)
  endif()
  include(CheckLanguage)
  check_language(CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    message(FATAL_ERROR
      "GDN_CUDA is ON but no CUDA compiler was found. Install the CUDA Toolkit 13 and put nvcc on "
      "PATH, or configure with -DGDN_CUDA=OFF (preset 'cpu-only') for the CPU back end alone.")
  endif()
  enable_language(CUDA)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 13.0)
    message(FATAL_ERROR
      "CUDA Toolkit 13.0 or newer is needed, found ${CMAKE_CUDA_COMPILER_VERSION} at "
      "${CMAKE_CUDA_COMPILER}. Install a newer toolkit or configure with -DGDN_CUDA=OFF.")
  endif()
  # CMake 3.25.1 does not know the CUDA20 dialect of nvcc.
  if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
  endif()
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  find_package(CUDAToolkit 13.0 REQUIRED)
endif()
