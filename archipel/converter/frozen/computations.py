"""What the train programs compute from the examples alone: one set of computations, in which equal ones are one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import onnx_ir as ir

from archipel.bundle.roles import Example, Feature, Program
from archipel.converter.frozen.rows import Rows
from archipel.graph import Model
from archipel.graph.build import Builder
from archipel.graph.model import TensorInfo
from archipel.graph.opset import IR_VERSION, OPSET
from archipel.graph.parameters import record_parameters
from archipel.graph.shapes import dtype_of
from archipel.training.assembly import port


class Result(NamedTuple):
    """Output `output` of computation number `computation`."""

    computation: int
    output: int


class Computation(NamedTuple):
    """An operator with its first result `value`; or, without `node`, a start: an example input or a constant."""

    node: ir.Node | None
    value: ir.Value
    inputs: tuple[Result | None, ...]


class Frozen:
    """The computations of all train programs. A computation has a higher number than those that it reads."""

    def __init__(self) -> None:
        self.computations: list[Computation] = []
        self.rows: dict[Result, Rows] = {}
        """The results that have rows, examples as they come among them."""
        self.weights: set[str] = set()
        """Names of the constants that are parameters of the model."""
        self._numbers: dict[object, int] = {}

    def value(self, result: Result) -> ir.Value:
        """A value that has this result, in one of the programs."""
        computation = self.computations[result.computation]
        return computation.value if computation.node is None else computation.node.outputs[result.output]

    def is_computed(self, result: Result) -> bool:
        """Whether it is more than an example as it comes."""
        return self.computations[result.computation].node is not None

    def start(self, value: ir.Value) -> Result:
        """The result that an example input or an initializer is."""
        tensor = value.const_value
        if value.is_graph_input() or tensor is None:
            return Result(self._add(("example", TensorInfo.of(value)), Computation(None, value, ())), 0)
        # By content, not by name: passes rename constants, and each program has its own copies.
        content = tensor.numpy()
        key = ("constant", content.dtype.name, content.shape, hashlib.sha256(content.tobytes()).digest())
        return Result(self._add(key, Computation(None, value, ())), 0)

    def apply(self, node: ir.Node, inputs: tuple[Result | None, ...]) -> int:
        """The number of the computation that this operator makes of these inputs."""
        # Equal operator, attributes and inputs give equal results: random operators are never frozen.
        attributes = sorted((name, _content(attribute)) for name, attribute in node.attributes.items())
        key = (node.op_type, tuple(attributes), inputs, len(node.outputs))
        return self._add(key, Computation(node, node.outputs[0], inputs))

    def program(self, names: Mapping[Result, str]) -> Model:
        """The program `features`: from the examples that it needs to these results, whose output names are given."""
        graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="features")
        op = Builder(graph)
        made: dict[Result, ir.Value] = {}
        # In ascending order every computation comes after those that it reads.
        needed = [(number, self.computations[number]) for number in sorted(self._needed(names))]
        for number, (node, value, _) in needed:
            if node is None and value.is_graph_input():
                made[Result(number, 0)] = op.input(str(value.name), dtype_of(value), TensorInfo.of(value).shape)
        for number, computation in needed:
            if Result(number, 0) not in made:
                results = _emit(op, computation, [None if i is None else made[i] for i in computation.inputs])
                made.update({Result(number, place): value for place, value in enumerate(results)})
        for result, name in names.items():
            op.free_name(name)
            op.name_output(made[result], name)
        model = ir.Model(graph, ir_version=IR_VERSION)
        record_parameters(model, [name for name in graph.initializers if name in self.weights])
        inputs = tuple(port(Example, value) for value in graph.inputs)
        outputs = tuple(port(Feature, value) for value in graph.outputs)
        return Model(model, signature=Program(kind="features", inputs=inputs, outputs=outputs))

    def _add(self, key: object, computation: Computation) -> int:
        # An equal computation has its number already; a new one gets the next.
        number = self._numbers.setdefault(key, len(self.computations))
        if number == len(self.computations):
            self.computations.append(computation)
        return number

    def _needed(self, results: Iterable[Result]) -> set[int]:
        needed: set[int] = set()
        stack = [result.computation for result in results]
        while stack:
            number = stack.pop()
            if number not in needed:
                needed.add(number)
                stack.extend(i.computation for i in self.computations[number].inputs if i is not None)
        return needed


def _emit(op: Builder, computation: Computation, inputs: list[ir.Value | None]) -> list[ir.Value]:
    node, value, _ = computation
    if node is None:
        copy = ir.Value(
            name=op.unique(str(value.name)), type=value.type, shape=value.shape, const_value=value.const_value
        )
        op.graph.register_initializer(copy)
        return [copy]
    # An output without a name is left out, and stays so.
    outputs = [ir.Value(name=v.name and op.unique(v.name), type=v.type, shape=v.shape) for v in node.outputs]
    attributes = list(node.attributes.values())
    op.graph.append(ir.Node("", node.op_type, inputs, attributes, outputs=outputs, name=op.unique(str(node.name))))
    return outputs


def _content(attribute: ir.Attr) -> object:
    """The attribute's value in a form that is hashable and compares by content."""
    if attribute.type == ir.AttributeType.TENSOR:
        array = attribute.as_tensor().numpy()
        return array.dtype.name, array.shape, array.tobytes()
    value = attribute.value
    return tuple(value) if isinstance(value, list | tuple) else value
