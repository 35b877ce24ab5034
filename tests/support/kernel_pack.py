"""The kernel pack, compiled from its sources for one test run."""

from __future__ import annotations

import os
import runpy
import shutil
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import onnxruntime as ort
import pytest

from archipel.lite_runtime.engines.kernels import KernelPack

SOURCES = Path(__file__).parents[2] / "kernel_pack"


def build_package(folder: Path, *more: str) -> Path:
    """Write the package `archipel_kernels` with its library to `folder`; `more` are g++'s options.

    Skips the test without g++ or oneDNN.
    """
    if shutil.which("g++") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("g++ is not installed: scripts/install_compiler.sh does")
        pytest.skip("g++ is not installed")
    script = runpy.run_path(str(SOURCES / "build_library.py"))
    package = folder / "archipel_kernels"
    shutil.copytree(SOURCES / "archipel_kernels", package)
    try:
        script["build"](package / script["NAME"], *more)
    except PackageNotFoundError as error:
        pytest.skip(f"{error.name} is not installed")
    return package


def open_session(model: bytes, pack: KernelPack | None) -> ort.InferenceSession:
    """Two threads; None: without the pack, so that functions' bodies run."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    options.log_severity_level = 4
    if pack is not None:
        pack.register(options, 2)
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
