"""Other engines, each in an environment and a process of its own; one JSON object a line goes to and fro."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lite_models import Files
from measure import KEPT_MEMORY

HERE = Path(__file__).parent / "peers"
ROOT = Path(__file__).parent.parent
DEFAULT_FOLDER = ROOT / ".cache" / "peers"

# Environment -> what pip installs there. NumPy is what arrays come in.
PACKAGES = {
    "litert": ("ai-edge-litert==2.3.0", "numpy"),
    "litert-convert": ("tensorflow-cpu==2.21.0", "onnx", "numpy"),
    "openvino": ("openvino==2026.4.1", "nncf", "numpy"),
    "mnn": ("MNN==3.6.1", "numpy"),
}
NAMES = {"litert": "LiteRT", "openvino": "OpenVINO", "mnn": "MNN", "torch": "PyTorch"}

# Its quantizer's graphs are int8 throughout (one conversion at either end), yet on one thread they took 1.7 (DS-CNN)
# and 2.6 times (ResNet-8) as long as float, at every precision and memory setting of a session.
NO_MNN_INT8 = (
    "MNN's wheel for x86-64 is built for AVX2 alone, without AVX-512 and VNNI, which the others use for int8: its time "
    "would say how the wheel was built"
)


class PeerError(Exception):
    """A peer cannot do what was asked; the text says why."""


def python_of(folder: Path, environment: str, benchmark: str = "benchmarks/lite.py") -> Path:
    """Raises PeerError where that environment is not installed; `benchmark` is what installs it."""
    path = folder / environment / "bin" / "python"
    if not (folder / environment / ".installed").exists():
        raise PeerError(f"{environment} is not installed in {folder}; run: python {benchmark} --install-peers")
    return path


def install(folder: Path, environment: str, packages: Sequence[str], stamp: str = "") -> Path:
    """An environment with `packages`, made once; the path of its Python. Raises PeerError where pip fails.

    It is made anew when `stamp` (by default the packages) is not what it was made for.
    """
    command = [sys.executable, str(ROOT / "scripts" / "environment.py"), str(folder / environment)]
    command += [*(["--stamp", stamp] if stamp else []), "--", *packages]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise PeerError(f"{environment} cannot be installed: see above what pip says")
    return Path(done.stdout.strip())


def clean_environment() -> dict[str, str]:
    """This process's variables without those that would lead another environment's Python to this one's packages."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


class Peer:
    """A running engine. Its messages go to a log file, its answers come back here."""

    def __init__(self, name: str, folder: Path, log: Path) -> None:
        self.name = name
        own = name == "torch"
        python = Path(sys.executable) if own else python_of(folder, name)
        self.log = log
        answers, its_end = os.pipe()
        with log.open("a") as messages:
            self._process = subprocess.Popen(
                [python, HERE / f"run_{name}.py", str(its_end)],
                stdin=subprocess.PIPE,
                stdout=messages,
                stderr=messages,
                text=True,
                pass_fds=[its_end],
                env=os.environ | KEPT_MEMORY if own else clean_environment(),
            )
        os.close(its_end)
        self._answers = os.fdopen(answers)

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._answers.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise PeerError(f"{self.name} ended with status {self._process.wait()}; {self._last_words()}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise PeerError(f"{self.name}: {reply['error']}")
        return reply

    def load(self, kind: str, files: Files, threads: int, folder: Path | None = None) -> str:
        """Get a model ready; the engine's version. Converted files are in `folder` (default: the network's own)."""
        paths = {
            "onnx": files.onnx,
            "inputs": files.inputs,
            "calibration": files.calibration,
            "state": files.state,
            "folder": folder or files.folder,
        }
        given = {key: str(path) for key, path in paths.items()} | {"make": files.case.make}
        return str(self.ask(do="load", kind=kind, files=given, threads=threads)["version"])

    def outputs(self, kind: str) -> np.ndarray:
        return np.array(self.ask(do="outputs", kind=kind)["outputs"], np.float32)

    def seconds(self, kind: str, calls: int) -> float:
        return float(self.ask(do="time", kind=kind, calls=calls)["seconds"])

    def close(self) -> None:
        if self._process.poll() is None:
            try:
                self._process.communicate('{"do": "quit"}\n', timeout=20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._answers.close()

    def _last_words(self) -> str:
        words = self.log.read_text(errors="replace").split()
        return f"its last words: {' '.join(words)[-200:]}"


def convert(name: str, kind: str, files: Files, folder: Path, log: Path) -> None:
    """Writes the files that peer `name` reads, beside the ONNX file, once. Raises PeerError."""
    model, place = files.onnx, files.folder
    if name == "litert":
        targets = [place / "float.tflite", place / "int8.tflite"]
        _convert("litert-convert", "convert_litert.py", [model, files.calibration, *targets], targets, folder, log)
    elif name == "mnn":
        if kind == "int8":
            raise PeerError(NO_MNN_INT8)
        target = place / "float.mnn"
        _convert("mnn", "convert_mnn.py", [model, target], [target], folder, log)


def _convert(
    environment: str, script: str, arguments: list[Path], targets: list[Path], folder: Path, log: Path
) -> None:
    if all(path.exists() for path in targets):
        return
    command = [python_of(folder, environment), HERE / script, *arguments]
    with log.open("a") as messages:
        done = subprocess.run(command, stdout=messages, stderr=messages, env=clean_environment(), check=False)
    if done.returncode:
        raise PeerError(f"conversion for {environment} ended with status {done.returncode}, see {log}")
