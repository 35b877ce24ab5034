#!/usr/bin/env bash
# PostgreSQL's programs from this system's packages, for the server's tests; they start a cluster of their own.
# With CI=true or --yes it installs what is missing; otherwise it names it. Ends with 0 if everything is there.
set -euo pipefail
. "$(dirname "$0")/apt.sh"

found() {
  command -v initdb >/dev/null || compgen -G "/usr/lib/postgresql/*/bin/initdb" >/dev/null
}

found && exit 0
may_install "the server's tests on PostgreSQL" "${1:-}" postgresql
# Without a cluster of the package's own: the tests make theirs.
apt_install postgresql-common
as_root sed -i 's/^#\?create_main_cluster.*/create_main_cluster = false/' /etc/postgresql-common/createcluster.conf
apt_install postgresql
found
