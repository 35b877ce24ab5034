#!/usr/bin/env bash
# Node.js 20 with npm, and Chromium: what the browser's runtime is built and tested with, from this system's packages.
# With CI=true or --yes it installs what is missing; otherwise it names it. Ends with 0 if everything is there.
set -euo pipefail
. "$(dirname "$0")/apt.sh"

NODE_MAJOR=20

missing() {
  command -v node >/dev/null || echo nodejs
  command -v npm >/dev/null || echo npm
  command -v chromium >/dev/null || echo chromium
}

mapfile -t packages < <(missing)
if [ ${#packages[@]} -gt 0 ]; then
  may_install "the browser's runtime" "${1:-}" "${packages[@]}"
  apt_install "${packages[@]}"
fi

major=$(node -p 'process.versions.node.split(".")[0]')
if [ "$major" -lt "$NODE_MAJOR" ]; then
  echo "the browser's runtime needs Node.js $NODE_MAJOR or newer, this is $(node --version); https://nodejs.org has it" >&2
  exit 1
fi
