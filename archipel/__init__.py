"""archipel: device-edge-cloud federated learning on one ONNX graph."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from archipel import engine_registry, importer_registry

if TYPE_CHECKING:
    from archipel.compression.compress import compress as compress
    from archipel.converter import convert as convert
    from archipel.converter import export as export
    from archipel.frontend import function as function
    from archipel.graph import Model as Model
    from archipel.mode import get_mode as get_mode
    from archipel.mode import set_mode as set_mode
    from archipel.simulation.simulate import simulate as simulate
    from archipel.training.cloud import TrainConfig as TrainConfig
    from archipel.training.cloud.train import train as train

__version__ = "0.1.0"
__all__ = [
    "Model", "TrainConfig", "__version__", "compress", "convert", "export", "function", "get_mode", "set_mode",
    "simulate", "train",
]  # fmt: skip

_HOMES = {
    "Model": "archipel.graph", "TrainConfig": "archipel.training.cloud", "compress": "archipel.compression",
    "convert": "archipel.converter", "export": "archipel.converter", "function": "archipel.frontend",
    "get_mode": "archipel.mode", "set_mode": "archipel.mode", "simulate": "archipel.simulation",
    "train": "archipel.training.cloud",
}  # fmt: skip
_ROOMS = (
    "autodiff", "bundle", "client", "compression", "converter", "datasets", "edge", "errors", "frontend",
    "graph", "insight", "insight_page", "lite_runtime", "models", "operator", "preprocessing", "privacy", "protocol",
    "server", "simulation", "strategies", "training",
)  # fmt: skip


def _load_importers() -> None:
    # `Model.from_torch` and its like are in `graph`, what does their work is in `converter`, which lies above it. This
    # package is above all rooms, so it may bring the two together, when the registry asks. Whoever imports any module
    # of archipel has run this file first.
    from archipel.converter import importers  # noqa: F401  (registers them)


def _load_openvino() -> Any:
    from archipel.lite_runtime.engines.openvino import OpenVINOSession, import_openvino

    import_openvino()
    return OpenVINOSession


def _load_torch() -> Any:
    from archipel.training.cloud.programs.engine import open_program

    return open_program


importer_registry.IMPORTERS.load_with(_load_importers)
# OpenVINO makes two plans for a session, each with code of its own and arenas.
engine_registry.ENGINES["openvino"] = engine_registry.Engine(
    "openvino", "openvino", _load_openvino, session_bytes=96 << 20
)
engine_registry.ENGINES["torch"] = engine_registry.Engine("torch", "cloud", _load_torch, fixed_bytes=256 << 20)


def __getattr__(name: str) -> Any:
    # Lazy, so that a device install (no onnx) can import archipel, and `import archipel` costs nothing.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _ROOMS:
        return import_module(f"archipel.{name}")
    raise AttributeError(f"module 'archipel' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_ROOMS])
