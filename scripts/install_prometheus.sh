#!/usr/bin/env bash
# promtool, from this system's package prometheus, with which the long tests check the alert rules.
# With CI=true or --yes it installs what is missing; otherwise it names it. Ends with 0 if it is there.
set -euo pipefail
. "$(dirname "$0")/apt.sh"

found() {
  command -v promtool >/dev/null
}

found && exit 0
may_install "the check of the alert rules" "${1:-}" prometheus
apt_install prometheus
found
