#!/usr/bin/env bash
# Node.js 20 with npm, and Chromium: what the browser's runtime is built and tested with, from this system's packages.
# With CI=true or --yes it installs what is missing; otherwise it names it. Ends with 0 if everything is there.
set -euo pipefail

NODE_MAJOR=20

missing() {
  command -v node >/dev/null || echo nodejs
  command -v npm >/dev/null || echo npm
  command -v chromium >/dev/null || echo chromium
}

mapfile -t packages < <(missing)
if [ ${#packages[@]} -gt 0 ]; then
  if [ "${CI:-}" != true ] && [ "${1:-}" != --yes ]; then
    echo "missing for the browser's runtime: ${packages[*]} (scripts/install_browser.sh --yes installs with apt-get)" >&2
    exit 1
  fi
  if ! command -v apt-get >/dev/null; then
    echo "missing for the browser's runtime: ${packages[*]}; there is no apt-get, install them as your system does" >&2
    exit 1
  fi
  as_root=()
  [ "$(id -u)" -eq 0 ] || as_root=(sudo)
  "${as_root[@]}" apt-get update -qq
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends "${packages[@]}"
fi

major=$(node -p 'process.versions.node.split(".")[0]')
if [ "$major" -lt "$NODE_MAJOR" ]; then
  echo "the browser's runtime needs Node.js $NODE_MAJOR or newer, this is $(node --version); https://nodejs.org has it" >&2
  exit 1
fi
