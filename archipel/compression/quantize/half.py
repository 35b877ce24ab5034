"""float16: stores weights in 16 bits, or computes the whole network in them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal

import numpy as np
import onnx_ir as ir
from onnx import defs

from archipel.compression.arguments import check_choices
from archipel.compression.compressed import CompressedModel
from archipel.compression.deploy import constants, evaluate_constants
from archipel.compression.part import Need
from archipel.compression.quantize.placement import source_name
from archipel.compression.quantize.simulation import float_form
from archipel.errors import CompressionError
from archipel.graph import Builder, Model
from archipel.graph.opset import OPSET
from archipel.graph.passes.constants import EXACT, UNPACK
from archipel.graph.shapes import rank
from archipel.graph.walk import bodies, dependencies

if TYPE_CHECKING:
    from archipel.compression.work import Work

HALF, SINGLE = ir.DataType.FLOAT16, ir.DataType.FLOAT
LARGEST = 65504.0  # of float16
_TYPES = ("to", "dtype", "output_datatype")  # attributes that name a type


@dataclass(frozen=True)
class Float16:
    """Weights in half the bytes.

    Training goes on in float32.

    Arguments:
        compute: "float32": runtimes widen the weights when they open the graph. "float16": the graph computes in
            float16 between a Cast of the inputs and one of the outputs, for GPUs and NPUs; on a CPU that is slower than
            float32. Inputs that an operator takes in float32 only stay float32.
        exclude: globs of names of weights that stay in float32.

    Raises CompressionError from `apply` for weights beyond 65504, the largest float16; for "float16" also for loops and
    branches.

    Example:
        small, report = archipel.compress(model, [Float16()])
    """

    compute: Literal["float32", "float16"] = "float32"
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_choices(self, compute=("float32", "float16"))

    @property
    def needs(self) -> tuple[Need, ...]:
        return ()

    def apply(self, model: CompressedModel, work: Work) -> CompressedModel:
        if model.training_form is not None:
            raise CompressionError("Float16: the model is quantized already; leave Float16 out of the recipe")
        simulated = float_form(model)
        graph = simulated.graph
        known = constants(graph)
        weights = _weights(graph, known, set(model.parameter_names), self.exclude)
        if not weights:
            raise CompressionError("Float16: the model has no float32 weights to store in float16")
        contents = evaluate_constants(simulated, [str(value.name) for value in weights])
        large = [name for name, content in contents.items() if np.abs(content).max(initial=0.0) > LARGEST]
        if large:
            raise CompressionError(f"Float16: {large[0]!r} has values beyond {LARGEST:g}; exclude it")
        if self.compute == "float32":
            _store(graph, weights, known)
        else:
            _compute(graph, known)
        work.note(weights=[str(value.name) for value in weights])
        return CompressedModel(simulated, training_form=Model(model.copy().ir))


def _weights(
    graph: ir.Graph, known: Collection[ir.Value], parameters: set[str], exclude: Collection[str]
) -> list[ir.Value]:
    """The constants, made of parameters, that the network reads; without scalars and running statistics."""
    from_parameters = {value for name, value in graph.initializers.items() if name in parameters}
    weights: dict[ir.Value, None] = {}
    for node in graph:
        inputs = dependencies(node)
        if all(value in known for value in inputs):
            if any(value in from_parameters for value in inputs):
                from_parameters.update(node.outputs)
        elif node.op_type != "BatchNormalization":
            # The node depends on an input: its constants are weights in their last form, behind masks and folding.
            read = (v for v in inputs if v in from_parameters and v.dtype == SINGLE and rank(v) > 0)
            weights.update(dict.fromkeys(v for v in read if not _matches(source_name(v), exclude)))
    return list(weights)


def _matches(name: str, globs: Collection[str]) -> bool:
    return any(name == glob or fnmatchcase(name, glob) for glob in globs)


def _store(graph: ir.Graph, weights: Collection[ir.Value], known: Collection[ir.Value]) -> None:
    op = Builder(graph, scope="float16")
    for value in weights:
        # Constants that are made of this weight, such as a scale, go on reading its float32 form.
        uses = [use for use in value.uses() if not all(v in known for v in dependencies(use.node))]
        maker = value.producer()
        with op.before(graph[0]) if maker is None else op.after(maker):
            wide = op.Cast(op.Cast(value, to=int(HALF)), to=int(SINGLE))
        # `deploy` keeps a marked node, so that devices store the float16 tensor and widen it themselves.
        unpacking = wide.producer()
        if unpacking is not None:
            unpacking.metadata_props[UNPACK] = ""
        for use in uses:
            use.node.replace_input_with(use.idx, wide)


def _compute(graph: ir.Graph, known: Collection[ir.Value]) -> None:
    """Turn all nodes that depend on an input to float16. Raises CompressionError for loops and branches."""
    op = Builder(graph, scope="float16")
    narrow: dict[ir.Value, ir.Value] = {}
    # Nodes that read an input of the graph or nothing at all (random numbers), but no constants.
    nodes = [node for node in graph if not all(v in known for v in dependencies(node)) or not dependencies(node)]
    nodes = [node for node in nodes if not all(output in known for output in node.outputs)]
    nodes = [node for node in nodes if EXACT not in node.metadata_props]

    def as_half(value: ir.Value, node: ir.Node) -> ir.Value:
        if value not in narrow:
            with op.before(node):
                narrow[value] = op.Cast(value, to=int(HALF))
        return narrow[value]

    for node in nodes:
        if bodies(node):
            raise CompressionError(
                f"Float16: {node.op_type} {node.name!r} is a loop or branch, which cannot be computed in float16; use "
                "compute='float32'"
            )
        takes = _takes_half(node)
        for index, value in enumerate(node.inputs):
            if value is None:
                continue
            # Types change in the graph's order: an input that is float16 here comes from a node that has been turned.
            if index in takes and value.dtype == SINGLE:
                node.replace_input_with(index, as_half(value, node))
            elif index not in takes and value.dtype == HALF:
                with op.before(node):
                    node.replace_input_with(index, op.Cast(value, to=int(SINGLE)))
        _narrow_attributes(node)
        # A clone shares its types with the original, so the output gets a new one.
        for index, output in enumerate(node.outputs):
            if output.dtype == SINGLE and _gives_half(node, index):
                output.type = ir.TensorType(HALF)
    for place, output in enumerate(list(graph.outputs)):
        if output.dtype == HALF and output.name:
            # The model's outputs keep their names and stay float32.
            name, output.name = output.name, op.unique(f"{output.name}/float16")
            wide = op.Cast(output, to=int(SINGLE))
            wide.name, wide.shape = name, output.shape
            graph.outputs[place] = wide


def _takes_half(node: ir.Node) -> set[int]:
    """The inputs that the operator takes in float16."""
    schema = defs.get_schema(node.op_type, OPSET, node.domain)
    allowed = {c.type_param_str: set(c.allowed_type_strs) for c in schema.type_constraints}
    indices = set()
    for index in range(len(node.inputs)):
        formal = schema.inputs[min(index, len(schema.inputs) - 1)]
        if "tensor(float16)" in allowed.get(formal.type_str, {formal.type_str}):
            indices.add(index)
    # ONNX allows float16 for the region and the scales of Resize (inputs 1 and 2), runtimes do not.
    return indices - {1, 2} if node.op_type == "Resize" else indices


def _gives_half(node: ir.Node, index: int) -> bool:
    schema = defs.get_schema(node.op_type, OPSET, node.domain)
    allowed = {c.type_param_str: set(c.allowed_type_strs) for c in schema.type_constraints}
    formal = schema.outputs[min(index, len(schema.outputs) - 1)]
    return "tensor(float16)" in allowed.get(formal.type_str, {formal.type_str})


def _narrow_attributes(node: ir.Node) -> None:
    for name, attribute in list(node.attributes.items()):
        if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype == SINGLE:
            content = attribute.as_tensor().numpy().astype(np.float16)
            node.attributes[name] = ir.AttrTensor(name, ir.tensor(content))
        elif attribute.type == ir.AttributeType.INT and name in _TYPES and attribute.as_int() == int(SINGLE):
            node.attributes[name] = ir.AttrInt64(name, int(HALF))
