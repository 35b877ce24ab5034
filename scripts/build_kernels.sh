#!/usr/bin/env bash
# Builds the wheel of the kernel pack into dist/, or the folder given. Needs g++; pip brings oneDNN.
#     scripts/build_kernels.sh && pip install dist/archipel_kernels-*.whl
set -euo pipefail
folder=$(realpath -m "${1:-dist}")
cd "$(dirname "$0")/.."
"${PYTHON:-python3}" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$folder" ./kernel_pack
echo "$folder"/archipel_kernels-*.whl
