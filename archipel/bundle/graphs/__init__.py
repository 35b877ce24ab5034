"""Checks a bundle's graphs by their bytes alone, on devices and servers, without the ONNX package."""

from archipel.bundle.graphs.inspection import MAX_GRAPH_BYTES, inspect_graph
from archipel.bundle.graphs.wire import WireError

__all__ = ["MAX_GRAPH_BYTES", "WireError", "inspect_graph"]
