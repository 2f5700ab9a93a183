#!/usr/bin/env bash
# Installs a build to a temporary prefix, then compiles and runs a C program against what is there.
# usage: install_test.sh CMAKE BUILD_FOLDER LIBRARY_FOLDER C_COMPILER [FLAG...]
set -euo pipefail
cmake=$1 build=$2 library_folder=$3
compile=("${@:4}")

prefix=$(mktemp -d)
trap 'rm -rf "$prefix"' EXIT
"$cmake" --install "$build" --prefix "$prefix/usr" >/dev/null

cat >"$prefix/program.c" <<'PROGRAM'
#include <gdn/kernels/gdn_kernels.h>
#include <math.h>
#include <stdio.h>

int main(void) {
  float x[2] = {3.0f, 4.0f}, y[2] = {0.0f, 0.0f};
  gdn_exec exec = {.backend = GDN_BACKEND_CPU};
  gdn_l2_norm_args args = {.rows = 1, .dim = 2, .x = x, .x_dtype = GDN_F32, .x_row_stride = 2,
                           .y = y, .y_dtype = GDN_F32, .y_row_stride = 2, .scale = 1.0f};
  gdn_status status = gdn_l2_norm(&exec, &args);
  printf("%s: %f %f\n", gdn_status_string(status), y[0], y[1]);
  return status != GDN_OK || fabsf(y[0] - 0.6f) > 1e-6f || fabsf(y[1] - 0.8f) > 1e-6f;
}
PROGRAM
"${compile[@]}" -std=c11 -Wall -Wextra -Werror -I "$prefix/usr/include" "$prefix/program.c" \
  -o "$prefix/program" -L "$prefix/usr/$library_folder" -Wl,-rpath,"$prefix/usr/$library_folder" \
  -lgdn_kernels -lm
"$prefix/program"
for program in "$prefix"/usr/bin/*; do
  [ -e "$program" ] || continue
  "$program" --version
done
