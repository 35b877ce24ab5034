"""The kernel pack, `archipel[kernels]`: native operators in place of the functions of the domain `archipel.kernels`.

Graphs of `step_graph(..., kernels=True)` have such functions. Their bodies are standard operators, which ONNX Runtime
runs wherever the pack is not installed or cannot be loaded.
"""

from __future__ import annotations

import importlib
from functools import cache
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any, NamedTuple

from archipel.bundle.graphs.operators import KERNELS_DOMAIN

MISSING = "the kernel pack is not installed (pip install 'archipel[kernels]'); standard operators run instead"

_THREADS = "archipel.threads"  # the pack reads it: into how many parts it splits a batch


class KernelPack(NamedTuple):
    """The pack's library, or why there is none."""

    library: str | None
    title: str

    def register(self, options: Any, threads: int) -> None:
        """Let a session with these options run the pack's operators. Raises ONNX Runtime's errors."""
        options.add_session_config_entry(_THREADS, str(threads))
        options.register_custom_ops_library(self.library)


@cache
def kernel_pack() -> KernelPack:
    """The installed pack, loaded with the first call."""
    try:
        package = importlib.import_module("archipel_kernels")
    except ImportError:
        return KernelPack(None, MISSING)
    try:
        return KernelPack(package.library(), package.title())
    except (OSError, PackageNotFoundError) as error:
        return KernelPack(None, f"the kernel pack cannot be loaded: {error}; install it again")


def calls_kernels(graph: Path) -> bool:
    """Whether the file has functions that the pack has operators for."""
    return KERNELS_DOMAIN.encode() in graph.read_bytes()
