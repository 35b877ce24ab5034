#!/usr/bin/env bash
# What the long suite builds and starts containers' images with: Buildah, which runs Dockerfiles without a daemon, and
# debootstrap, which makes the base. With --yes it installs what is missing; otherwise it names it.
set -euo pipefail
. "$(dirname "$0")/apt.sh"

packages=()
command -v buildah >/dev/null || packages+=(buildah)
command -v debootstrap >/dev/null || packages+=(debootstrap)
[ ${#packages[@]} -eq 0 ] && exit 0
may_install "the containers' images" "${1:-}" "${packages[@]}"
apt_install "${packages[@]}"
