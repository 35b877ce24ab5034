"""Raises MissingExtraError, naming the `convert` extra, before another import fails on a missing package."""

from __future__ import annotations

from archipel.errors import MissingExtraError

try:
    import onnx
    import onnx_ir
except ModuleNotFoundError as error:
    raise MissingExtraError((error.name or "onnx").partition(".")[0], "convert") from None

__all__ = ["onnx", "onnx_ir"]
