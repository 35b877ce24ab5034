# Sourced by the scripts that install what the tests need: `may_install WHAT YES PACKAGES...` ends the script with a word
# about what is missing unless CI=true or YES is --yes and there is apt-get; `apt_install PACKAGES...` installs.
may_install() {
  local what=$1 yes=$2
  shift 2
  if [ "${CI:-}" != true ] && [ "$yes" != --yes ]; then
    echo "missing for $what: $* ($0 --yes installs with apt-get)" >&2
    exit 1
  fi
  if ! command -v apt-get >/dev/null; then
    echo "missing for $what: $*; there is no apt-get, install them as your system does" >&2
    exit 1
  fi
}

as_root() {
  if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi
}

apt_install() {
  as_root apt-get update -qq
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends "$@"
}
