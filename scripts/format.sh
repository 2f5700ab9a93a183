#!/usr/bin/env bash
# Formats every C++ and CUDA file; with --check only says which ones differ.
# usage: scripts/format.sh [--check]
set -euo pipefail
. "$(dirname "$0")/common.sh"
help_if_asked "$@"
install_packages clang-format git
cd "$repo"
mode=(-i)
[ "${1:-}" = --check ] && mode=(--dry-run --Werror)
git ls-files -z -- '*.h' '*.cc' '*.cu' '*.cuh' | xargs -0 clang-format "${mode[@]}"
