#!/usr/bin/env bash
# PostgreSQL's programs from this system's packages, for the server's tests; they start a cluster of their own.
# With CI=true or --yes it installs what is missing; otherwise it names it. Ends with 0 if everything is there.
set -euo pipefail

found() {
  command -v initdb >/dev/null || compgen -G "/usr/lib/postgresql/*/bin/initdb" >/dev/null
}

found && exit 0
if [ "${CI:-}" != true ] && [ "${1:-}" != --yes ]; then
  echo "missing for the server's tests on PostgreSQL: postgresql (scripts/install_postgres.sh --yes installs with apt-get)" >&2
  exit 1
fi
if ! command -v apt-get >/dev/null; then
  echo "missing for the server's tests: PostgreSQL; there is no apt-get, install it as your system does" >&2
  exit 1
fi
as_root=()
[ "$(id -u)" -eq 0 ] || as_root=(sudo)
"${as_root[@]}" apt-get update -qq
# Without a cluster of the package's own: the tests make theirs.
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends postgresql-common
"${as_root[@]}" sed -i 's/^#\?create_main_cluster.*/create_main_cluster = false/' /etc/postgresql-common/createcluster.conf
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends postgresql
found
