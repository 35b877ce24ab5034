"""The sources of a model that `convert` takes: files, modules, estimators, or a Model."""

from __future__ import annotations

import os
from typing import Any

from archipel.errors import ConversionError
from archipel.graph import Model


def read_model(source: Any, example: Any) -> Model:
    """The source as a Model. Raises ConversionError if it is no source, ModelImportError if it cannot be read."""
    check_source(source, example)
    if isinstance(source, Model):
        return source
    if isinstance(source, str | os.PathLike):
        return Model.from_torch(source, example) if os.fspath(source).endswith(".pt2") else Model.from_onnx(source)
    return Model.from_torch(source, example) if _is_torch(source) else Model.from_sklearn(source, example)


def check_source(source: Any, example: Any) -> None:
    """Refuse a source that no importer takes, and one without the example that it needs. Reads nothing."""
    name = type(source).__name__
    if isinstance(source, Model | str | os.PathLike):
        return
    if _is_torch(source):  # a module, or a program of torch.export, which has its examples
        if example is None and not hasattr(source, "graph_signature"):
            raise ConversionError(f"{name}: a torch module needs example=, a tensor that it takes")
        return
    if hasattr(source, "get_params") and (hasattr(source, "predict") or hasattr(source, "transform")):
        if example is None:
            raise ConversionError(f"{name}: an estimator needs example=, an array of [examples, features]")
        return
    raise ConversionError(
        "source: expected a path (.onnx, .pt2), an archipel.Model, a torch module or program, or a scikit-learn "
        f"estimator, got {name}"
    )


def _is_torch(source: Any) -> bool:
    return hasattr(source, "state_dict")  # without importing PyTorch, which takes seconds, or may not be installed
