"""Make models small: graph to graph, whatever framework they came from."""

from archipel.compression.quantize import StaticInt8, quantize_static
from archipel.compression.refresh import refresh_program

__all__ = ["StaticInt8", "quantize_static", "refresh_program"]
