#!/usr/bin/env bash
# Builds everything and runs every test that needs no GPU. The last line is
# 'N passed, N failed, N skipped'.
# usage: scripts/test.sh [ctest arguments]      environment: GDN_CUDA=ON|OFF (default: as available)
set -euo pipefail
. "$(dirname "$0")/common.sh"
help_if_asked "$@"

install_packages "${build_packages[@]}" "${test_packages[@]}"
choose_cuda
configure_and_build

say "running the tests"
report="$build/junit.xml"
rm -f "$report"
status=0
(cd "$repo" && ctest --preset "$preset" -j "$(nproc)" --output-junit "$report" "$@") || status=$?
[ -s "$report" ] || die "ctest left no report: see the lines above"
count() { sed -n "s/.*<testsuite[^>]*[[:space:]]$1=\"\([0-9]*\)\".*/\1/p; s/^[[:space:]]*$1=\"\([0-9]*\)\".*/\1/p" "$report" | head -n 1; }
total=$(count tests)
failed=$(count failures)
skipped=$(count skipped)
echo "$((total - failed - skipped)) passed, $failed failed, $skipped skipped"
exit "$status"
