"""What each part of a graph costs in a training step: FLOPs, bytes moved, bytes kept, parameters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import onnx_ir as ir

from archipel.errors import TrainingError
from archipel.graph import Model
from archipel.graph.flops import flops
from archipel.graph.liveness import source
from archipel.graph.parameters import trainable_names
from archipel.graph.sizes import Sizes
from archipel.graph.walk import dependencies, only_reader

# Operators whose products count: their speed is that of matrix units, not of memory.
PRODUCTS = frozenset({"MatMul", "Gemm", "Einsum", "LSTM", "GRU", "RNN"})
CONVOLUTIONS = frozenset({"Conv", "ConvTranspose", "DeformConv"})
_VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Transpose"})
# They compute numbers about shapes, once, in no time.
_SHAPES = frozenset({"Shape", "Size", "Constant", "ConstantOfShape"})


@dataclass(frozen=True)
class Tensor:
    """A value at the batch size of the plan: shape and bytes. `examples` are the axes that grow with the batch."""

    name: str
    shape: tuple[int, ...]
    nbytes: int
    examples: tuple[int, ...] = ()


@dataclass(frozen=True)
class Operand:
    """A parameter as an operator reads it: its axis `axes[i]` is axis i of what the operator sees."""

    parameter: Tensor
    axes: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parameter.shape[axis] for axis in self.axes)


@dataclass(frozen=True)
class Unit:
    """One operator with what is computed along with it: the bias of a product, a weight that is turned.

    Attributes:
        name: that of the node whose output leaves the unit.
        node: the operator itself.
        nodes: names of all nodes of the unit.
        reads: for each input of the operator (and then the bias that is added) a value that other units compute or the
            caller gives, a parameter, or None for constants and inputs that are left out.
        writes: what leaves the unit.
        flops: of the forward pass over the whole batch.
        traffic: bytes that the forward pass reads and writes at least.
        saved: bytes of results that the backward pass reads.
        backward: the backward pass's work as a multiple of the forward pass's.
    """

    name: str
    node: ir.Node
    nodes: tuple[str, ...]
    reads: tuple[Tensor | Operand | None, ...]
    writes: tuple[Tensor, ...]
    flops: float
    traffic: float
    saved: float
    backward: float

    @property
    def op_type(self) -> str:
        return self.node.op_type

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return tuple(read.parameter for read in self.reads if isinstance(read, Operand))

    @property
    def activations(self) -> tuple[tuple[int, Tensor], ...]:
        """Place among `reads`, and value, of what is no parameter."""
        return tuple((place, read) for place, read in enumerate(self.reads) if isinstance(read, Tensor))


@dataclass(frozen=True)
class Costs:
    """A graph's units in order, for one batch size.

    Attributes:
        batch_size: examples of a whole batch, over all processes.
        inputs: the graph's inputs.
        outputs: names of the graph's outputs.
        parameters: all that learn.
    """

    batch_size: int
    units: tuple[Unit, ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[str, ...]
    parameters: tuple[Tensor, ...]

    @property
    def parameter_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.parameters)


def costs(model: Model, batch_size: int) -> Costs:
    """The costs of a training step with this many examples.

    Arguments:
        model: a model whose only symbolic size is the batch, the first axis of its inputs.
        batch_size: examples of the whole batch, 1 or more.

    Raises TrainingError for another symbolic size, GraphError for work without a bound.

    Example:
        found = costs(Model.from_onnx("lenet.onnx"), 128)
        print(sum(unit.flops for unit in found.units))
    """
    if batch_size < 1:
        raise TrainingError(f"a plan expects a batch of 1 or more examples, got {batch_size}")
    graph = model.ir.graph
    batch = {str(info.shape[0]) for info in model.inputs if info.shape and not isinstance(info.shape[0], int)}
    others = {str(d) for info in model.inputs for d in info.shape if not isinstance(d, int)} - batch
    if others or len(batch) > 1:
        name = min(others or batch)
        raise TrainingError(f"the size {name!r} is not known; give it: model.fix(sizes={{{name!r}: 128}})")
    sizes, larger = Sizes(model.ir, batch_size), Sizes(model.ir, 2 * batch_size)
    learned = set(trainable_names(model.ir, "*"))
    # Of a model for one example; what a batch costs follows from its share.
    work = flops(_at(model, batch_size) if batch else model)

    def tensor(value: ir.Value) -> Tensor:
        shape = sizes(value)
        examples = tuple(axis for axis, (one, two) in enumerate(zip(shape, larger(value))) if one != two)
        return Tensor(str(value.name), shape, sizes.nbytes(value), examples)

    parameters = {name: tensor(value) for name, value in graph.initializers.items() if name in learned}
    absorbed = _absorbed(graph, parameters)
    from_outside = {value: tensor(value) for value in graph.inputs if str(value.name) not in graph.initializers}
    known: dict[ir.Value, Tensor] = dict(from_outside)
    learns: set[ir.Value] = set()
    units: list[Unit] = []
    for node in graph:
        if node in absorbed or node.op_type in _SHAPES or _is_about_shapes(node, known, parameters):
            continue
        bias_node = next((last for last, first in _biased(absorbed) if first is node), None)
        operands: list[ir.Value | None] = list(node.inputs)
        if bias_node is not None:
            operands += [value for value in bias_node.inputs if value is not node.outputs[0]]
        captured = [value for value in dependencies(node) if value not in node.inputs]
        reads = tuple(_read(value, known, parameters) for value in (*operands, *captured))
        last = bias_node or node
        writes = tuple(tensor(value) for value in last.outputs if value.name)
        known.update(zip([value for value in last.outputs if value.name], writes))
        trained = [v for v in (*operands, *captured) if v in learns]
        has_parameters = any(isinstance(read, Operand) for read in reads)
        if trained or has_parameters:
            learns.update(last.outputs)
        count = float(work.get(str(node.name) or str(node.outputs[0].name), 0))
        is_view = node.op_type in _VIEWS
        moved = 0 if is_view else sum(w.nbytes for w in writes) + sum(_nbytes(read) for read in reads)
        products = node.op_type in PRODUCTS | CONVOLUTIONS
        # A product's backward pass is one product for each factor that has a gradient. What begins at the data has none
        # to give back there. Elementwise operators read two tensors and write one.
        factors = (bool(trained) + has_parameters) if products and not _both(trained, reads) else 2
        backward = float(factors) if trained or has_parameters else 0.0
        units.append(
            Unit(
                name=str(last.name or last.outputs[0].name),
                node=node,
                nodes=tuple(str(n.name) for n in (node, *([bias_node] if bias_node else []))),
                reads=reads,
                writes=writes,
                flops=count,
                traffic=float(moved),
                saved=0.0 if is_view or not backward else float(sum(w.nbytes for w in writes)),
                backward=backward,
            )
        )
    outputs = tuple(str(source(value).name) if source(value) in known else str(value.name) for value in graph.outputs)
    return Costs(batch_size, tuple(units), tuple(from_outside.values()), outputs, tuple(parameters.values()))


def _at(model: Model, batch_size: int) -> Model:
    names = {str(info.shape[0]) for info in model.inputs if info.shape and not isinstance(info.shape[0], int)}
    return model.fix(sizes=dict.fromkeys(names, batch_size))


def _both(trained: list[ir.Value], reads: Iterable[object]) -> bool:
    """Whether a product's factors both come from layers before it: attention."""
    return len(trained) > 1 or (len(trained) == 1 and not any(isinstance(read, Operand) for read in reads))


def _nbytes(read: Tensor | Operand | None) -> int:
    if read is None:
        return 0
    return read.parameter.nbytes if isinstance(read, Operand) else read.nbytes


def _read(
    value: ir.Value | None, known: dict[ir.Value, Tensor], parameters: dict[str, Tensor]
) -> Tensor | Operand | None:
    if value is None:
        return None
    if value in known:
        return known[value]
    turned = tuple(range(len(value.shape or ())))
    node = value.producer()
    if node is not None and node.op_type == "Transpose" and node.inputs[0] is not None:
        perm = node.attributes.get_ints("perm") or turned[::-1]
        value, turned = node.inputs[0], tuple(perm)
    parameter = parameters.get(str(value.name)) if value.producer() is None else None
    return None if parameter is None else Operand(parameter, turned)


def _absorbed(graph: ir.Graph, parameters: dict[str, Tensor]) -> dict[ir.Node, ir.Node | None]:
    """Nodes that belong to another's unit: turned parameters (None), and sums of a product and a bias (the product)."""
    found: dict[ir.Node, ir.Node | None] = {}
    for node in graph:
        if node.op_type == "Transpose" and str(getattr(node.inputs[0], "name", "")) in parameters:
            found[node] = None
        if node.op_type != "Add":
            continue
        for product_value, bias in (node.inputs, tuple(reversed(node.inputs))):
            product = None if product_value is None else product_value.producer()
            if product is None or product.op_type != "MatMul" or bias is None or bias.producer() is not None:
                continue
            weight = _read(product.inputs[1], {}, parameters)
            if isinstance(weight, Operand) and str(bias.name) in parameters and len(bias.shape or ()) == 1:
                if only_reader(product.outputs[0]) is node and not product.outputs[0].is_graph_output():
                    found[node] = product
                break
    return found


def _biased(absorbed: dict[ir.Node, ir.Node | None]) -> list[tuple[ir.Node, ir.Node]]:
    return [(last, first) for last, first in absorbed.items() if first is not None]


def _is_about_shapes(node: ir.Node, known: dict[ir.Value, Tensor], parameters: dict[str, Tensor]) -> bool:
    """Whether a node reads nothing that a unit computes, the caller gives or that is learned."""
    values = dependencies(node)
    return not any(value in known or _read(value, known, parameters) is not None for value in values)
