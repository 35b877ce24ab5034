"""archipel: device-edge-cloud federated learning on one ONNX graph."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from archipel.graph import Model as Model

__version__ = "0.1.0"
__all__ = ["Model", "__version__"]


def __getattr__(name: str) -> Any:
    # Lazy, so that a device install (no onnx) can import archipel.
    if name == "Model":
        return import_module("archipel.graph").Model
    raise AttributeError(f"module 'archipel' has no attribute {name!r}")
