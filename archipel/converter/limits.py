"""What the programs need at most, from their graphs alone: bytes alive at once, FLOPs per example, bytes to upload."""

from __future__ import annotations

import math
from collections.abc import Mapping

import onnx_ir as ir

from archipel.bundle import Limits
from archipel.bundle.roles import Update
from archipel.errors import ConversionError
from archipel.graph import Model
from archipel.graph.shapes import dims

_UPLOAD_ENTRY_BYTES = 4  # the widest modulus, 32 bits


def compute_limits(programs: Mapping[str, Model], batch_size: int) -> Limits:
    """Bounds over all programs, with every symbolic dimension taken as `batch_size` examples.

    `peak_bytes` counts inputs, weights and the intermediate values that are alive together, in the graph's order;
    kernels' scratch space and the runtime itself come on top. FLOPs are two per multiply-accumulate of the
    convolutions and matrix products.
    """
    peak = max(_peak_bytes(program.ir.graph, batch_size) for program in programs.values())
    flops = max(_flops(program.ir.graph) for program in programs.values())
    entries = 0
    for program in programs.values():
        ports = program.signature.outputs if program.signature is not None else ()
        sizes = (math.prod(int(d) for d in port.shape) for port in ports if isinstance(port, Update))
        entries = max(entries, sum(sizes))
    return Limits(peak_bytes=peak, flops_per_example=flops, upload_bytes=entries * _UPLOAD_ENTRY_BYTES)


def _peak_bytes(graph: ir.Graph, batch_size: int) -> int:
    always = [*graph.inputs, *graph.initializers.values()]
    held = sum(_nbytes(value, batch_size) for value in always)
    last_use: dict[ir.Value, ir.Node] = {}
    for node in graph:
        for value in node.inputs:
            if value is not None:
                last_use[value] = node
    kept = {*always, *graph.outputs}
    alive = peak = held
    for node in graph:
        alive += sum(_nbytes(value, batch_size) for value in node.outputs)
        peak = max(peak, alive)
        ended = {v for v in node.inputs if v is not None and v not in kept and last_use[v] is node}
        unused = {v for v in node.outputs if v not in kept and v not in last_use}
        alive -= sum(_nbytes(value, batch_size) for value in ended | unused)
    return peak


def _nbytes(value: ir.Value, batch_size: int) -> int:
    if value.dtype is None or value.shape is None:
        raise ConversionError(f"limits: value {value.name!r} has no known type and shape, so its size has no bound")
    size = math.prod(d if isinstance(d, int) else batch_size for d in dims(value))
    return math.ceil(size * value.dtype.itemsize)


def _flops(graph: ir.Graph) -> int:
    total = 0
    for node in graph:
        if node.op_type in ("Conv", "ConvTranspose"):
            weight, spread = node.inputs[1], node.outputs[0] if node.op_type == "Conv" else node.inputs[0]
            # Every spatial position meets the kernel once per channel pair of its group.
            total += 2 * _elements(weight) * _elements(spread) // max(_channels(spread), 1)
        elif node.op_type in ("Gemm", "MatMul"):
            a, out = node.inputs[0], node.outputs[0]
            transposed = node.op_type == "Gemm" and "transA" in node.attributes and node.attributes["transA"].as_int()
            inner = dims(a)[0 if transposed else -1] if a is not None and a.shape is not None else 1
            total += 2 * _elements(out) * (inner if isinstance(inner, int) else 1)
    return total


def _elements(value: ir.Value | None) -> int:
    if value is None or value.shape is None:
        return 0
    return math.prod(d if isinstance(d, int) else 1 for d in dims(value))


def _channels(value: ir.Value | None) -> int:
    shape = dims(value) if value is not None and value.shape is not None else ()
    return shape[1] if len(shape) > 1 and isinstance(shape[1], int) else 1
