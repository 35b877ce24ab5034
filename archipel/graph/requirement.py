"""The portable IR needs the `convert` extra; say so before anything else fails on it."""

from __future__ import annotations

from archipel.errors import MissingExtraError

try:
    import onnx
    import onnx_ir
except ModuleNotFoundError as error:
    raise MissingExtraError((error.name or "onnx").partition(".")[0], "convert") from None

__all__ = ["onnx", "onnx_ir"]
