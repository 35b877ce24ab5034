"""NNCF and OpenVINO, in an environment and processes of their own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import beside  # noqa: F401
import numpy as np
from lite_peers import HERE, PACKAGES, Peer, PeerError, clean_environment, install, python_of
from lite_predict import Runner

ENVIRONMENT = "openvino"
WAYS: dict[str, dict[str, Any]] = {
    f"{preset}, {bias} bias correction": {"preset": preset, "bias": bias}
    for preset, bias in product(("performance", "mixed"), ("fast", "slow"))
}
"""The first has its defaults for a convolutional network. All are without accuracy control, which needs labels."""


def install_environment(folder: Path) -> None:
    """Raises PeerError with pip's last lines."""
    install(folder, ENVIRONMENT, PACKAGES[ENVIRONMENT])


def quantize(
    folder: Path, source: Path, calibration: Path, inputs: Path, out: Path, options: Mapping[str, Any]
) -> tuple[np.ndarray, dict[str, str]]:
    """NNCF's int8 of `source` at `out`.xml and .bin, with one of WAYS' options; its answers to the inputs (float32
    [n, classes]), and versions. Raises PeerError.
    """
    files = [source, calibration, inputs, out]
    command = [python_of(folder, ENVIRONMENT), HERE / "nncf_quantize.py", *files, options["preset"], options["bias"]]
    done = subprocess.run(command, capture_output=True, text=True, env=clean_environment(), check=False)
    if done.returncode:
        raise PeerError(f"NNCF: status {done.returncode}: {' '.join(done.stderr.split())[-300:]}")
    versions: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    answers = np.load(f"{out}.npy")
    Path(f"{out}.npy").unlink()
    return answers, versions


@contextmanager
def runners(folder: Path, models: dict[str, Path], example: Path, threads: int, log: Path) -> Iterator[list[Runner]]:
    """Files (ONNX or OpenVINO IR) by name, each ready to be timed in one process. Raises PeerError."""
    peer = Peer(ENVIRONMENT, folder, log)
    try:
        yield [_runner(peer, name, path, example, threads) for name, path in models.items()]
    finally:
        peer.close()


def _runner(peer: Peer, name: str, path: Path, example: Path, threads: int) -> Runner:
    files: dict[str, Any] = {"onnx": str(path), "inputs": str(example)}
    # A kind that begins with "int8" would be quantized by the process.
    kind = f"given {name}"
    peer.ask(do="load", kind=kind, files=files, threads=threads)
    return Runner(name, lambda: peer.outputs(kind), lambda calls: peer.seconds(kind, calls))
