#!/usr/bin/env bash
# Builds and runs the tests under AddressSanitizer + UBSan (everything on the CPU) and
# ThreadSanitizer (engine, pipeline and CPU kernels; nothing that links gRPC).
# usage: scripts/sanitize.sh [asan-ubsan|tsan]...
set -euo pipefail
. "$(dirname "$0")/common.sh"
help_if_asked "$@"
install_packages "${build_packages[@]}" "${test_packages[@]}"
[ $# -gt 0 ] || set -- asan-ubsan tsan
cd "$repo"
for preset in "$@"; do
  say "sanitizers: $preset"
  [ -f "build/$preset/build.ninja" ] || cmake --preset "$preset" >/dev/null
  cmake --build --preset "$preset"
  ctest --preset "$preset" -j "$(nproc)" ${CTEST_ARGS:-}
done
