"""FLOPs of a graph: two per multiply-accumulate of convolutions and matrix products, in any number format."""

from __future__ import annotations

import math
from collections.abc import Callable

import onnx_ir as ir

from archipel.bundle.roles import Example, Feature, Label
from archipel.graph.batch import fixed_batch
from archipel.graph.functions import inline_functions
from archipel.graph.model import Model
from archipel.graph.passes.constants import EXACT
from archipel.graph.sizes import Sizes
from archipel.graph.walk import bodies

# Operator -> index of the input that is its second factor; the first factor is input 0.
_CONVOLUTIONS = {"Conv": 1, "ConvTranspose": 1, "ConvInteger": 1, "QLinearConv": 3, "DeformConv": 1}
_PRODUCTS = {"MatMul": 1, "Gemm": 1, "MatMulInteger": 1, "QLinearMatMul": 3}


def flops_per_example(model: Model) -> int:
    """FLOPs for one example of one step: two per multiply-accumulate of convolutions and matrix products.

    Float and integer operators count alike, recurrent ones and Einsum included. The body of a Scan or Loop counts once
    for each iteration, an If as the larger of its branches. Elementwise operators count nothing.

    Arguments:
        model: any model; symbolic sizes count as 1. Of a model for batches of a fixed size this is its share.

    Raises GraphError for work without a bound: a Loop that only its condition ends, a value of unknown rank.

    Example:
        print(flops_per_example(archipel.Model.from_onnx("lenet.onnx")))
    """
    return sum(flops(model).values()) // (model.steps * _fixed_examples(model))


def network_flops_per_example(model: Model) -> int:
    """As `flops_per_example`, without transforms in front of the network."""
    return sum(network_flops(model).values()) // (model.steps * _fixed_examples(model))


def _fixed_examples(model: Model) -> int:
    """The number of examples in a batch of fixed size; 1 if the batch is symbolic, or the model reads none."""
    if model.signature is None:
        return fixed_batch(model.ir) or 1
    ports = [port for port in model.signature.inputs if isinstance(port, Example | Label | Feature) and port.shape]
    # In a program of several steps the first axis counts these.
    place = 0 if model.steps == 1 else 1
    sizes = {port.shape[place] if len(port.shape) > place else None for port in ports}
    size = sizes.pop() if len(sizes) == 1 else None
    return size if isinstance(size, int) and size > 0 else 1


def flops(model: Model) -> dict[str, int]:
    """FLOPs by node name for one run with one example (or a fixed batch), without nodes that have none.

    A node with bodies (Scan, Loop, If) includes theirs. Nodes of local functions count one by one, under the names that
    inlining gives them. Raises GraphError as `flops_per_example`.
    """
    if model.ir.functions:
        model = model.copy()
        inline_functions(model.ir)
    sizes = Sizes(model.ir, 1)
    by_name: dict[str, int] = {}
    for node in model.ir.graph:
        if count := _flops(node, sizes):
            name = node.name or str(node.outputs[0].name)
            by_name[name] = by_name.get(name, 0) + count
    return by_name


def network_flops(model: Model) -> dict[str, int]:
    """As `flops`, without what prepares raw inputs in front of the network (`passes.constants.EXACT`)."""
    preparing = {node.name for node in model.ir.graph if EXACT in node.metadata_props}
    return {name: count for name, count in flops(model).items() if name not in preparing}


def _flops(node: ir.Node, sizes: Sizes) -> int:
    if node.domain != "":
        return 0
    if node.op_type in _CONVOLUTIONS:
        weight = sizes(node.inputs[_CONVOLUTIONS[node.op_type]])
        spread = sizes(node.inputs[0] if node.op_type == "ConvTranspose" else node.outputs[0])
        # Each output position (of a ConvTranspose each input position) multiplies with the whole weight once. `spread`
        # counts each position once per channel.
        return 2 * math.prod(weight) * math.prod(spread) // max(spread[1], 1)
    if node.op_type in _PRODUCTS:
        return 2 * _products(node, sizes)
    if node.op_type == "Einsum":
        return 2 * einsum_products(node, sizes)
    if node.op_type in ("LSTM", "GRU", "RNN"):
        # Each step of each example multiplies the input by W and the state by R, of all directions.
        weights = math.prod(sizes(node.inputs[1])) + math.prod(sizes(node.inputs[2]))
        return 2 * math.prod(sizes(node.inputs[0])[:2]) * weights
    if inner_graphs := bodies(node):
        times = sizes.iterations(node) if node.op_type in ("Loop", "Scan") else 1
        return times * max(sum(_flops(inner, sizes) for inner in body) for body in inner_graphs)
    return 0


def _products(node: ir.Node, sizes: Sizes) -> int:
    a, b = sizes(node.inputs[0]), sizes(node.inputs[_PRODUCTS[node.op_type]])
    out = math.prod(sizes(node.outputs[0]))
    flipped = [node.op_type == "Gemm" and bool(node.attributes.get_int(name)) for name in ("transA", "transB")]
    columns = 1 if len(b) == 1 else b[-2 if flipped[1] else -1]
    # Elements of Y times the length of a sum, or elements of A times the columns of B. Either is too small where a size
    # that it reads is unknown and counts as 1, so the larger counts.
    return max(out * a[0 if flipped[0] else -1], math.prod(a) * columns)


def einsum_products(node: ir.Node, sizes: Callable[[ir.Value | None], tuple[int, ...]]) -> int:
    """Multiplications of an Einsum that joins its operands one after the other; none for a single operand.

    `sizes` gives the shape of a value.
    """
    equation = node.attributes.get_string("equation", "").replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms, size = [], dict[str, int]()
    for term, value in zip(left.split(","), node.inputs):
        letters = _letters(term, sizes(value))
        terms.append(set(letters))
        for letter, length in letters.items():
            size[letter] = max(size.get(letter, 1), length)
    if not arrow:  # the output then has the letters that occur once, and the ellipsis
        right = "".join(letter for letter in size if len(letter) == 1 and left.count(letter) == 1)
    kept = set(right) | {letter for letter in size if letter.startswith("dot")}
    joined, total = terms[0], 0
    for place, other in enumerate(terms[1:], start=2):
        # Joining two operands costs one multiplication for each combination of their axes. After that an axis is summed
        # out unless the output or a later operand has it.
        total += math.prod(size[letter] for letter in joined | other)
        joined = {letter for letter in joined | other if letter in kept.union(*terms[place:])}
    return total


def _letters(term: str, shape: tuple[int, ...]) -> dict[str, int]:
    """Axis label -> size; an axis of an ellipsis is labelled by its distance from the ellipsis' end."""
    before, dots, after = term.partition("...")
    count = len(shape) - len(before) - len(after) if dots else 0
    axes = [*before, *(f"dot{count - i}" for i in range(count)), *after]
    return dict(zip(axes, shape))
