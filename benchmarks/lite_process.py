"""What a process of the device install costs against one of PyTorch: import, cold start, installed bytes, peak memory.

Each has an environment of its own with nothing else in it: `pip install` of this repository, and of PyTorch's CPU build
with NumPy, without which it takes no arrays.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from lite_models import Files
from lite_peers import HERE, ROOT, PeerError, clean_environment, install
from lite_predict import OURS, say
from measure import Row, compare

PYTORCH = "PyTorch"
TORCH = "torch==2.13.0"
CONSTRAINTS = ("--constraint", str(ROOT / "constraints.txt"))
SOURCES = ("archipel", "pyproject.toml", "README.md", "LICENSE", "LICENSES")
_PIP = ("pip", "setuptools", "pkg_resources", "_distutils_hack", "distutils-precedence.pth", "wheel")


class Environments:
    """The two environments below `folder`; the device install is made anew when the sources change."""

    def __init__(self, folder: Path) -> None:
        self.device = device_environment(folder)
        self.torch = install(folder, "torch", [TORCH, "numpy", *CONSTRAINTS], stamp=TORCH)

    def python(self, name: str) -> Path:
        return self.device if name == OURS else self.torch


def device_environment(folder: Path) -> Path:
    """The Python of an environment with this repository's device install. Raises PeerError."""
    with tempfile.TemporaryDirectory(prefix="archipel-sources-") as copy:
        # Of a copy: setuptools builds in the folder that it is given.
        for name in SOURCES:
            source, target = ROOT / name, Path(copy) / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, target)
        return install(folder, "device", [copy, *CONSTRAINTS], stamp=_digest(Path(copy)))


def process_rows(
    files: Files, folder: Path, wanted: Callable[[str], bool], threads: list[int], rounds: int
) -> list[Row]:
    """All rows but predict's and fit's, for the FedAvg CNN. Raises PeerError where an environment cannot be made."""
    names = [f"{files.name} {row}" for row in ("import", "cold start", "install", "rss")]
    if not any(map(wanted, names)):
        return []
    environments = Environments(folder)
    rows = []
    if wanted(names[0]):
        times = repeated(environments, {OURS: ["import"], PYTORCH: ["import"]}, rounds)
        rows += compare("lite", names[0], OURS, scaled(times, "seconds", 1e3))
        own = statistics.median(each["own"] for each in times[OURS]) * 1e3
        say(f"{files.name} import: {own:.0f} ms of ours before ONNX Runtime, which is imported with the first session")
    if wanted(names[1]):
        given = {
            OURS: ["cold", str(files.bundle), files.keys[0].hex(), str(files.inputs)],
            PYTORCH: ["cold", str(files.state), str(files.inputs)],
        }
        times = repeated(environments, given, rounds)
        rows += compare("lite", names[1], OURS, scaled(times, "seconds", 1e3))
        rows += compare("lite", f"{files.name} process to answer", OURS, scaled(times, "alive", 1e3))
    if wanted(names[2]):
        sizes = {name: [installed(environments.python(name)) / 2**20] for name in (OURS, PYTORCH)}
        rows += compare("lite", names[2], OURS, sizes, "MB")
    if wanted(names[3]):
        x, y = (str(files.folder / f"fit-{name}.npy") for name in "xy")
        for path, array in zip((x, y), files.data(320)):
            np.save(path, array)
        for count in threads:
            given = {
                OURS: ["fit", str(files.train(32)), files.keys[0].hex(), x, y, str(count)],
                PYTORCH: ["fit", str(files.state), x, y, str(count)],
            }
            peaks = repeated(environments, given, min(rounds, 5))
            case = f"{names[3]}, {count} thread{'s' * (count > 1)}"
            rows += compare("lite", case, OURS, scaled(peaks, "rss", 1), "MB")
    return rows


def repeated(
    environments: Environments, arguments: dict[str, list[str]], rounds: int
) -> dict[str, list[dict[str, float]]]:
    """What the processes said, in turns; the first of each, with cold file caches, does not count."""
    said: dict[str, list[dict[str, float]]] = {name: [] for name in arguments}
    for index in range(rounds + 1):
        for name, given in arguments.items():
            script = HERE / ("process_archipel.py" if name == OURS else "process_torch.py")
            command = [environments.python(name), script, *given]
            started = time.time()
            done = subprocess.run(
                command, capture_output=True, text=True, env=clean_environment(), cwd=HERE.parent, check=False
            )
            if done.returncode:
                raise PeerError(f"{script.name} {given[0]}: {' '.join(done.stderr.split())[-300:]}")
            result: dict[str, Any] = json.loads(done.stdout)
            result["alive"] = result.get("ready", started) - started
            if index:
                said[name].append(result)
    return said


def scaled(said: dict[str, list[dict[str, float]]], key: str, factor: float) -> dict[str, list[float]]:
    return {name: [each[key] * factor for each in results] for name, results in said.items()}


def installed(python: Path) -> int:
    """Bytes of all files that pip put there, compiled Python included, without pip and setuptools themselves."""
    (packages,) = (python.parent.parent / "lib").glob("python*/site-packages")
    return sum(
        path.lstat().st_size
        for entry in packages.iterdir()
        if entry.name.split("-")[0] not in _PIP and entry.name not in _PIP
        for path in (entry.rglob("*") if entry.is_dir() else [entry])
        if not path.is_dir()
    )


def _digest(folder: Path) -> str:
    sha = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            sha.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return sha.hexdigest()
