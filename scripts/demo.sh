#!/usr/bin/env bash
# Builds the server if needed, starts it with the demo model and streams a continuation of a prompt.
# usage: scripts/demo.sh [--] ["prompt"]   environment: GDN_CUDA=ON|OFF (default: as available)
set -euo pipefail
. "$(dirname "$0")/common.sh"
help_if_asked "$@"

case "${1:-}" in
  --) shift ;;
  -*) die "unknown option '$1'; a prompt that begins with '-' goes after '--'. See --help" ;;
esac
[ $# -le 1 ] || die "one prompt is expected, got $#: put it in quotes. See --help"
prompt=${1:-"And God said unto Moses, "}
model="$repo/deploy/models/demo-gdn-7m"

[ -f "$model/model.safetensors" ] ||
  die "$model/model.safetensors is missing: restore it with 'git checkout -- deploy/models'"
install_packages "${build_packages[@]}"
choose_cuda
configure_and_build gdn_server gdnctl

work=$(mktemp -d)
server_pid=
cleanup() {
  if [ -n "$server_pid" ] && kill -0 "$server_pid" 2>/dev/null; then
    kill -TERM "$server_pid" 2>/dev/null || true
    wait "$server_pid" 2>/dev/null || true
  fi
  rm -rf "$work"
}
trap cleanup EXIT

say "starting gdn_server with $(basename "$model")"
"$build/server/gdn_server" --model "$model" --listen 127.0.0.1:0 --metrics-listen off \
  --port-file "$work/port" >"$work/server.log" 2>&1 &
server_pid=$!
for _ in $(seq 200); do
  [ -s "$work/port" ] && break
  kill -0 "$server_pid" 2>/dev/null || {
    cat "$work/server.log" >&2
    die "the server did not start: see the lines above"
  }
  sleep 0.05
done
[ -s "$work/port" ] || die "the server did not open its port within 10 s: $(cat "$work/server.log")"

say "prompt: $prompt"
"$build/client/cpp/gdnctl" --server "127.0.0.1:$(cat "$work/port")" generate --stats \
  --connect-timeout 30 --max-new-tokens 400 -- "$prompt" ||
  die "gdnctl failed; the server said: $(cat "$work/server.log")"

say "stopping the server"
kill -TERM "$server_pid"
wait "$server_pid" || die "the server did not stop cleanly: $(cat "$work/server.log")"
server_pid=
