#!/usr/bin/env bash
# Makes sure that a Redis server is on the PATH for the tests that run on both Valkey and Redis.
set -euo pipefail
command -v redis-server >/dev/null && exit 0
if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
  echo "Installing redis-server ..."
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -qq redis-server >/dev/null
  exit 0
fi
echo "The tests run on Valkey and on Redis: put redis-server (7.0 or newer) on the PATH, then run make again." >&2
exit 1
