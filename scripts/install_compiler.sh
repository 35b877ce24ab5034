#!/usr/bin/env bash
# g++ from this system's packages, with which the tests compile the kernel pack.
# With CI=true or --yes it installs what is missing; otherwise it names it. Ends with 0 if it is there.
set -euo pipefail
. "$(dirname "$0")/apt.sh"

found() {
  command -v g++ >/dev/null
}

found && exit 0
may_install "the kernel pack's tests" "${1:-}" g++ libc6-dev
apt_install g++ libc6-dev
found
