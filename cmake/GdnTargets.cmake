# The functions every CMakeLists.txt here is written with. Sources are listed, never globbed.

# Designated initialisers leave fields at their defaults on purpose.
set(GDN_WARNINGS -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion
  -Wno-missing-field-initializers)
if(GDN_WERROR)
  list(APPEND GDN_WARNINGS -Werror)
endif()

function(_gdn_configure target)
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:${GDN_WARNINGS}>)
endfunction()

# gdn_library(name SRCS a.cc ... [DEPS ...]): a static library of one folder. Includes are written
# from the repository root ("server/engine/engine.h").
function(gdn_library name)
  cmake_parse_arguments(ARG "" "" "SRCS;DEPS" ${ARGN})
  add_library(${name} STATIC ${ARG_SRCS})
  target_include_directories(${name} PUBLIC ${PROJECT_SOURCE_DIR})
  target_link_libraries(${name} PUBLIC ${ARG_DEPS} Threads::Threads)
  _gdn_configure(${name})
endfunction()

function(gdn_executable name)
  cmake_parse_arguments(ARG "" "" "SRCS;DEPS" ${ARGN})
  add_executable(${name} ${ARG_SRCS})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR})
  target_link_libraries(${name} PRIVATE ${ARG_DEPS} Threads::Threads)
  _gdn_configure(${name})
endfunction()

# gdn_test(name SRCS ... DEPS ... [LABELS unit ...] [TIMEOUT 120] [ENVIRONMENT A=b]): one GoogleTest
# binary; every case becomes a ctest entry, so a skip is visible as a skip.
function(gdn_test name)
  if(NOT GDN_TESTS)
    return()
  endif()
  cmake_parse_arguments(ARG "NO_MAIN" "TIMEOUT;PREFIX" "SRCS;DEPS;LABELS;ENVIRONMENT" ${ARGN})
  if(NOT ARG_LABELS)
    set(ARG_LABELS unit)
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  find_package(GTest REQUIRED)
  include(GoogleTest)
  gdn_executable(${name} SRCS ${ARG_SRCS} DEPS ${ARG_DEPS} GTest::gtest GTest::gmock)
  if(NOT ARG_NO_MAIN)
    target_link_libraries(${name} PRIVATE GTest::gtest_main)
  endif()
  target_compile_definitions(${name} PRIVATE GDN_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  # Discovery does not carry a list as the value of a property, so ctest reads them from a file of
  # their own.
  gtest_discover_tests(${name} DISCOVERY_MODE PRE_TEST NO_PRETTY_VALUES TEST_LIST ${name}_cases
    TEST_PREFIX "${ARG_PREFIX}")
  set(properties ${CMAKE_CURRENT_BINARY_DIR}/${name}_properties.cmake)
  file(CONFIGURE OUTPUT ${properties} @ONLY CONTENT "if(@name@_cases)
  set_tests_properties(\${@name@_cases} PROPERTIES
    LABELS [==[@ARG_LABELS@]==] TIMEOUT @ARG_TIMEOUT@ ENVIRONMENT [==[@ARG_ENVIRONMENT@]==])
endif()
")
  set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES ${properties})
endfunction()

# gdn_bench(name SRCS ... DEPS ...): a benchmark; built with the rest so that it never rots.
function(gdn_bench name)
  if(NOT GDN_BENCH)
    return()
  endif()
  cmake_parse_arguments(ARG "" "" "SRCS;DEPS" ${ARGN})
  find_package(benchmark REQUIRED)
  gdn_executable(${name} SRCS ${ARG_SRCS} DEPS ${ARG_DEPS} benchmark::benchmark)
endfunction()

# gdn_fuzzer(name SRCS f.cc DEPS ... CORPUS dir): the source defines LLVMFuzzerTestOneInput. Without
# GDN_FUZZ it is linked with a small driver that replays the corpus and runs a bounded number of
# seeded mutations, so the tests exercise it with any compiler.
function(gdn_fuzzer name)
  cmake_parse_arguments(ARG "" "CORPUS" "SRCS;DEPS" ${ARGN})
  if(GDN_FUZZ)
    gdn_executable(${name} SRCS ${ARG_SRCS} DEPS ${ARG_DEPS})
    target_compile_options(${name} PRIVATE -fsanitize=fuzzer)
    target_link_options(${name} PRIVATE -fsanitize=fuzzer)
  elseif(GDN_TESTS)
    gdn_executable(${name} SRCS ${ARG_SRCS} ${PROJECT_SOURCE_DIR}/tests/fuzz/replay_main.cc
      DEPS ${ARG_DEPS})
    add_test(NAME ${name} COMMAND ${name} --mutations=20000 ${ARG_CORPUS})
    set_tests_properties(${name} PROPERTIES LABELS fuzz TIMEOUT 120)
  endif()
endfunction()
