#!/usr/bin/env bash
# Formats every C++ and CUDA file; with --check only says which ones differ.
set -euo pipefail
. "$(dirname "$0")/common.sh"
install_packages clang-format git
cd "$repo"
mode=(-i)
[ "${1:-}" = --check ] && mode=(--dry-run --Werror)
git ls-files -z -- '*.h' '*.cc' '*.cu' '*.cuh' | xargs -0 clang-format "${mode[@]}"
