"""What the programs need at most, from their graphs alone: bytes alive at once, FLOPs per example, bytes to upload."""

from __future__ import annotations

import math
from collections.abc import Mapping

import onnx
import onnx_ir as ir

from archipel.autodiff.activity import dependencies
from archipel.bundle import Limits
from archipel.bundle.roles import Update
from archipel.errors import ConversionError
from archipel.graph import Model
from archipel.graph.shapes import constant_array, dims

_UPLOAD_ENTRY_BYTES = 4  # the widest modulus, 32 bits
_ENDLESS = 2**31  # exporters write the largest int64 for "until the condition says so"


def compute_limits(programs: Mapping[str, Model], batch_size: int) -> Limits:
    """Bounds over all programs, with every symbolic dimension taken as `batch_size` examples.

    `peak_bytes` counts inputs, weights and the intermediate values that are alive together, in the graph's order;
    kernels' scratch space and the runtime itself come on top. FLOPs are two per multiply-accumulate of the
    convolutions and matrix products, recurrent operators included; the body of a Scan or Loop counts once for each
    item, of the branches of an If the larger one. Raises ConversionError for what has no bound: a Loop whose number
    of iterations is computed, a value of unknown rank.
    """
    peak = flops = entries = 0
    for program in programs.values():
        signature = program.signature
        peak = max(peak, _peak_bytes(program.ir.graph, _Sizes(program, batch_size)))
        flops = max(flops, flops_per_example(program))
        ports = signature.outputs if signature is not None else ()
        sizes = (math.prod(int(d) for d in port.shape) for port in ports if isinstance(port, Update))
        entries = max(entries, sum(sizes))
    return Limits(peak_bytes=peak, flops_per_example=flops, upload_bytes=entries * _UPLOAD_ENTRY_BYTES)


def flops_per_example(program: Model) -> int:
    """Two per multiply-accumulate, for one example of one step. Raises ConversionError for what has no bound."""
    total = _flops(program.ir.graph, _Sizes(program, 1))
    return total // (1 if program.signature is None else program.signature.steps)


class _Sizes:
    """The shape of every value of a program whose symbolic dimensions are all `free`."""

    def __init__(self, program: Model, free: int) -> None:
        self._free = free
        proto = ir.to_proto(program.ir)
        fields = {field.name for field in proto.graph.input}
        names = {dim.dim_param for field in proto.graph.input for dim in field.type.tensor_type.shape.dim} - {""}
        for value in (*proto.graph.input, *proto.graph.value_info, *proto.graph.output):
            for dim in value.type.tensor_type.shape.dim:
                if not dim.HasField("dim_value") and (dim.dim_param in names or value.name in fields):
                    dim.dim_value = free
        # What a reshape makes of two dimensions has no name of its own, but with numbers it has a size.
        inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True)
        self._found = {
            value.name: [d.dim_value if d.HasField("dim_value") else None for d in value.type.tensor_type.shape.dim]
            for value in (*inferred.graph.value_info, *inferred.graph.output)
            if value.type.tensor_type.HasField("shape")
        }

    def __call__(self, value: ir.Value | None) -> tuple[int, ...]:
        """Empty for a value that is left out. Raises ConversionError if its rank is not known."""
        if value is None or not value.name:
            return ()
        found: list[int | None] = self._found.get(value.name, [])
        if value.shape is not None:
            known = [d if isinstance(d, int) else None for d in dims(value)]
            found = [a if b is None else b for a, b in zip(found, known)] if len(found) == len(known) else known
        elif value.name not in self._found:
            raise ConversionError(f"limits: value {value.name!r} has no known shape, so its size has no bound")
        node = value.producer()
        if found.count(None) == 1 and node is not None and node.op_type == "Reshape":
            rest = math.prod(d for d in found if d is not None)
            return tuple(math.prod(self(node.inputs[0])) // max(rest, 1) if d is None else d for d in found)
        return tuple(self._free if d is None else d for d in found)

    def nbytes(self, value: ir.Value) -> int:
        if value.dtype is None:
            raise ConversionError(f"limits: value {value.name!r} has no known type, so its size has no bound")
        return math.ceil(math.prod(self(value)) * value.dtype.itemsize)


def _peak_bytes(graph: ir.Graph, sizes: _Sizes) -> int:
    always = [*graph.inputs, *graph.initializers.values()]
    last_use: dict[ir.Value, ir.Node] = {}
    for node in graph:
        last_use.update(dict.fromkeys(dependencies(node), node))
    kept = {*always, *graph.outputs}
    alive = peak = sum(map(sizes.nbytes, always))
    made: set[ir.Value] = set()
    for node in graph:
        results = {value for value in node.outputs if value.name}
        made |= results
        alive += sum(map(sizes.nbytes, results))
        peak = max(peak, alive + max((_peak_bytes(body, sizes) for body in _bodies(node)), default=0))
        ended = {v for v in dependencies(node) if v in made and v not in kept and last_use[v] is node}
        unused = {v for v in results if v not in kept and v not in last_use}
        alive -= sum(map(sizes.nbytes, ended | unused))
    return peak


def _flops(graph: ir.Graph, sizes: _Sizes) -> int:
    total = 0
    for node in graph:
        if node.op_type in ("Conv", "ConvTranspose"):
            spread = sizes(node.outputs[0] if node.op_type == "Conv" else node.inputs[0])
            # Every spatial position meets the kernel once per channel pair of its group.
            total += 2 * math.prod(sizes(node.inputs[1])) * math.prod(spread) // max(spread[1], 1)
        elif node.op_type in ("Gemm", "MatMul"):
            total += 2 * _products(node, sizes)
        elif node.op_type in ("LSTM", "GRU", "RNN"):
            weights = math.prod(sizes(node.inputs[1])) + math.prod(sizes(node.inputs[2]))
            total += 2 * math.prod(sizes(node.inputs[0])[:2]) * weights
        elif bodies := _bodies(node):
            total += _trips(node, sizes) * max(_flops(body, sizes) for body in bodies)
    return total


def _products(node: ir.Node, sizes: _Sizes) -> int:
    a, b, out = sizes(node.inputs[0]), sizes(node.inputs[1]), math.prod(sizes(node.outputs[0]))
    flipped = [node.op_type == "Gemm" and bool(node.attributes.get_int(name)) for name in ("transA", "transB")]
    columns = 1 if len(b) == 1 else b[-2 if flipped[1] else -1]
    # Either way of counting is right where all sizes are known.
    return max(out * a[0 if flipped[0] else -1], math.prod(a) * columns)


def _bodies(node: ir.Node) -> list[ir.Graph]:
    return [a.as_graph() for a in node.attributes.values() if a.type == ir.AttributeType.GRAPH]


def _trips(node: ir.Node, sizes: _Sizes) -> int:
    """How often the node runs a body."""
    if node.op_type == "Scan":
        axis = (node.attributes.get_ints("scan_input_axes") or [0])[-1]
        return sizes(node.inputs[-1])[axis]
    if node.op_type == "Loop":
        count = constant_array(node.inputs[0])
        if count is None or int(count.reshape(())) >= _ENDLESS:
            raise ConversionError(
                f"limits: Loop {node.name!r} has no fixed number of iterations, so its work has no bound; export the "
                "model with a maximum"
            )
        return int(count.reshape(()))
    return 1
