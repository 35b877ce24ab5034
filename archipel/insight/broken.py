"""The errors that libraries raise for a graph that is well formed as a file and makes no sense."""

from __future__ import annotations

from google.protobuf.message import Error as ProtobufError  # type: ignore[import-untyped]

from archipel.errors import ArchipelError

BROKEN = (
    ArchipelError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError,
    NotImplementedError, MemoryError, ProtobufError,
)  # fmt: skip
"""onnx's inference raises RuntimeError, onnx_ir and the counting of FLOPs what Python does for a node that lacks an
input. A page tells the reason, and shows the rest."""
