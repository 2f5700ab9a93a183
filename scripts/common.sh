# Shared by the scripts beside it; sourced, not run.

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf '==> %s\n' "$*" >&2; }
die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# help_if_asked "$@": with --help or -h first, prints the comment that the script begins with and ends.
help_if_asked() {
  case "${1:-}" in
    --help | -h)
      sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "$0"
      exit 0
      ;;
  esac
}

# Debian 12 packages. Tests and benchmarks are configured with the rest, so the build needs theirs
# too; only running the tests needs the last ones.
build_packages=(
  g++ cmake ninja-build ccache pkg-config
  libgrpc++-dev protobuf-compiler-grpc libprotobuf-dev protobuf-compiler libabsl-dev
  prometheus-cpp-dev nlohmann-json3-dev libcli11-dev libspdlog-dev libxxhash-dev
  libhwy-dev libdnnl-dev ocl-icd-opencl-dev  # oneDNN's CMake package looks for OpenCL
  libgtest-dev libgmock-dev libbenchmark-dev python3
)
test_packages=(
  python3-grpcio python3-protobuf
  python3-yaml python3-jsonschema python3-pip debootstrap bubblewrap  # tests/deploy
)

# install_packages NAME...: installs what is missing, as root or through sudo.
install_packages() {
  local missing=() name
  for name in "$@"; do
    dpkg-query -W -f '${db:Status-Status}\n' "$name" 2>/dev/null | grep -qx installed ||
      missing+=("$name")
  done
  [ ${#missing[@]} -eq 0 ] && return 0
  command -v apt-get >/dev/null ||
    die "apt-get not found: these scripts install Debian 12 packages. On another system install: ${missing[*]}"
  local as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null ||
      die "packages are missing and this is not root: install sudo, or run as root: apt-get install ${missing[*]}"
    as_root=(sudo)
  fi
  say "installing ${#missing[@]} Debian packages: ${missing[*]}"
  "${as_root[@]}" apt-get update -qq ||
    die "apt-get update failed: check the network and /etc/apt/sources.list, then run this again"
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    "${missing[@]}" >/dev/null ||
    die "apt-get install failed: these scripts are written for Debian 12 (bookworm); see the lines above"
}

# Decides whether CUDA is built: GDN_CUDA=ON or OFF, by default ON where nvcc 13 is on the PATH.
choose_cuda() {
  case "${GDN_CUDA:-auto}" in
    ON | on | 1) cuda=ON ;;
    OFF | off | 0) cuda=OFF ;;
    auto)
      cuda=OFF
      if command -v nvcc >/dev/null && nvcc --version | grep -Eq 'release (1[3-9]|[2-9][0-9])\.'; then
        cuda=ON
      fi
      ;;
    *) die "GDN_CUDA must be ON or OFF, got '${GDN_CUDA}'" ;;
  esac
  if [ "$cuda" = ON ] && ! command -v nvcc >/dev/null; then
    die "GDN_CUDA=ON but nvcc is not on the PATH: install the CUDA Toolkit 13, or set GDN_CUDA=OFF"
  fi
  preset=$([ "$cuda" = ON ] && echo ci || echo cpu-only)
  build="$repo/build/$preset"
}

# configure_and_build [TARGET...]: quiet unless something fails.
configure_and_build() {
  local log="$repo/build/$preset.log"
  mkdir -p "$repo/build"
  if [ ! -f "$build/build.ninja" ]; then
    say "configuring preset '$preset' (CUDA: $cuda)"
    (cd "$repo" && cmake --preset "$preset") >"$log" 2>&1 || {
      tail -n 30 "$log" >&2
      die "configuring failed: see $log. Remove $build to start over."
    }
  fi
  if [ -n "$(ninja -C "$build" -n "$@" 2>/dev/null | grep -v 'no work to do' | grep '^\[')" ]; then
    say "building (the first build takes some minutes; log: $log)"
  fi
  ninja -C "$build" "$@" >"$log" 2>&1 || {
    grep -A 20 -m 3 -E 'FAILED|error' "$log" >&2 || tail -n 30 "$log" >&2
    die "the build failed: see $log"
  }
}
