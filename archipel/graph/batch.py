"""A batch axis of fixed size made symbolic.

One walk over the graph infers every shape with the batch at seven times its size; the axis that grew by seven carries
the batch. On the way constants that hold the fixed size are rewritten: targets of Reshape and Expand, sizes of Resize,
initial states of recurrent layers, tokens that are concatenated to each example, summands and masks with a row for each
example.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from archipel.errors import GraphError
from archipel.graph.build import Builder
from archipel.graph.opset import OPSET
from archipel.graph.parameters import parameter_names
from archipel.graph.passes.dead_code import remove_dead_code
from archipel.graph.shapes import constant_array, dims, infer_node, static_size
from archipel.graph.walk import bodies, dependencies

BATCH = "batch"
STAYS = "the batch stays "
"""How the note of an import report begins that says why a batch is not symbolic."""

_TIMES = 7  # a prime that few models have as a size

_BROADCASTING = frozenset(
    {"Add", "Sub", "Mul", "Div", "Pow", "Mod", "Max", "Min", "Mean", "Sum", "PRelu", "Where", "MatMul", "And", "Or"}
    | {"Xor", "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"}
)


class FixedBatchError(GraphError):
    """The batch cannot be made symbolic; the message says why and names the node."""


def fixed_batch(model: ir.Model) -> int | None:
    """The size of the first axis of all inputs, scalars aside; None if one is symbolic, or they differ."""
    first = {dims(value)[0] for value in model.graph.inputs if value.shape is not None and dims(value)}
    size = first.pop() if len(first) == 1 else None
    return size if isinstance(size, int) and size > 0 else None


def free_batch(model: ir.Model) -> ir.Model:
    """A copy of a model whose inputs all have a first axis of one fixed size, with that axis symbolic, named "batch".

    Every output of the copy that depends on the inputs has the batch as its first axis. Shapes do not tell whether
    examples influence each other (a Softmax over the batch): compare the results of the copy with the model's.

    Raises FixedBatchError.
    """
    size = fixed_batch(model)
    if size is None:
        raise FixedBatchError("the inputs have no first axis of one fixed size")
    return _Walk(model.clone(), size).run()


class _Walk:
    """`old`: shapes at the model's own batch size; `axis`: which axis carries the batch; `outer`: how many elements of
    that axis are in front of the batch, above 1 where a Reshape merged [time, batch]; `lost`: the node after which a
    value that depends on the inputs has no batch axis any more; `shared`: weights cut to one row, by their axis."""

    def __init__(self, model: ir.Model, size: int) -> None:
        self.model, self.size = model, size
        self.parameters = set(parameter_names(model))
        self.op = Builder(model.graph)
        self.old: dict[ir.Value, tuple[int, ...]] = {}
        self.axis: dict[ir.Value, int] = {}
        self.outer: dict[ir.Value, int] = {}
        self.shared: dict[ir.Value, int] = {}
        self.lost: dict[ir.Value, ir.Node] = {}

    def run(self) -> ir.Model:
        graph = self.model.graph
        for value in (*graph.inputs, *graph.initializers.values()):
            self.old[value] = self._static(value)
        # All old shapes first: the walk overwrites the graph's shapes and inserts nodes.
        nodes = list(graph)
        for node in nodes:
            for output in node.outputs:
                if output.name:
                    self.old[output] = self._static(output)
        for value in graph.inputs:
            if self.old[value]:
                self.axis[value] = 0
                value.shape = ir.Shape([self.size * _TIMES, *self.old[value][1:]])
        for node in nodes:
            if any(value in self.axis or value in self.lost for value in dependencies(node)):
                self._visit(node)
        # Outputs that depend on no input are in neither dictionary.
        for value in graph.outputs:
            if value in self.lost:
                raise self._error(self.lost[value], f"removes the batch axis, which the output {value.name!r} needs")
            if self.axis.get(value, 0) != 0:
                raise FixedBatchError(f"the output {value.name!r} has the batch on axis {self.axis[value]}, not 0")
            if value in self.axis and self.old[value][0] != self.size:
                raise FixedBatchError(
                    f"the output {value.name!r} merges the batch with other axes: its first is {self.old[value][0]}"
                )
        self._name_shapes()
        remove_dead_code(self.model)
        return self.model

    def _static(self, value: ir.Value) -> tuple[int, ...]:
        shape = None if value.shape is None else dims(value)
        sizes = tuple(d for d in shape or () if isinstance(d, int))
        if shape is None or len(sizes) != len(shape):
            producer = value.producer()
            where = f"input {value.name!r}" if producer is None else f"output of {producer.op_type} {producer.name!r}"
            raise FixedBatchError(
                f"{where} has sizes that are known at run time only: {'?' if shape is None else shape}"
            )
        return sizes

    def _visit(self, node: ir.Node) -> None:
        if bodies(node):
            raise self._error(node, "has a body that reads values with the batch")
        if node.domain != "":
            raise self._error(node, f"is of domain {node.domain!r}")
        # Rewrite what holds the old size, then infer the shapes for the larger batch.
        fix = _FIXES.get(node.op_type)
        with self.op.before(node):
            if fix is not None:
                fix(self, node)
        try:
            infer_node(node, OPSET)
        except GraphError as error:
            raise FixedBatchError(f"{error} (with more than one example)") from None
        for output in node.outputs:
            if output.name:
                self._compare(node, output)

    def _compare(self, node: ir.Node, output: ir.Value) -> None:
        # Exactly one axis may have grown, by the factor; none at all means that the node reduced the batch away.
        old, new = self.old[output], self._static(output)
        changed = [axis for axis, (a, b) in enumerate(zip(old, new)) if a != b]
        if len(old) != len(new) or len(changed) > 1 or any(new[axis] != old[axis] * _TIMES for axis in changed):
            raise self._error(
                node, f"gives {list(new)} for {_TIMES} times the examples, {list(old)} for the examples once"
            )
        # A value without a batch axis is no error yet: only an output that needs one is. It blames the first such node.
        if changed:
            self.axis[output] = axis = changed[0]
            if output not in self.outer:  # else a Reshape has said so
                carriers = [value for value in node.inputs if value is not None and value in self.axis]
                same = [value for value in carriers if self.old[value][self.axis[value]] == old[axis]]
                self.outer[output] = max((self.outer.get(value, 1) for value in same), default=1)
        else:
            self.lost[output] = self.lost.get(node.inputs[0], node) if node.inputs[0] is not None else node

    def _error(self, node: ir.Node, why: str) -> FixedBatchError:
        return FixedBatchError(f"{node.op_type} {node.name!r} {why}")

    def _name_shapes(self) -> None:
        for value, axis in self.axis.items():
            shape: list[int | str] = list(self.old[value])
            share = self.old[value][axis] // self.size  # above 1 where a Reshape merged other axes into the batch
            shape[axis] = BATCH if share == 1 else f"{share}*{BATCH}"
            value.shape = ir.Shape(shape)
        for node in self.model.graph:
            for value in node.outputs:
                # Nodes that the walk inserted still have shapes of the larger batch.
                if value.name and value not in self.old:
                    value.shape = ir.Shape([None] * len(dims(value)))

    # Rewriting of constants that hold the batch size, one method per operator.

    def reshape(self, node: ir.Node) -> None:
        data, output = node.inputs[0], node.outputs[0]
        if data is None or data not in self.axis:
            return
        if constant_array(node.inputs[1]) is None:
            raise self._error(node, "computes its target shape at run time")
        # A Reshape keeps the order in memory: the result's batch has as many elements in front of it as before. Its
        # axis takes -1, for any batch. It may be merged with axes behind it and in front of it, so it is a multiple of
        # the size.
        before = math.prod(self.old[data][: self.axis[data]]) * self.outer.get(data, 1)
        target = list(self.old[output])
        fits = []
        for axis in range(len(target) if 0 not in target else 0):
            outer, rest = divmod(before, math.prod(target[:axis]))
            if outer > 0 and rest == 0 and target[axis] % (outer * self.size) == 0:
                fits.append((outer, axis))
        if not fits:
            raise self._error(node, f"reshapes {list(self.old[data])} to {target}, which splits the batch")
        self.outer[output], axis = min(fits)
        target[axis] = -1
        node.replace_input_with(1, self.op.constant(np.array(target, np.int64)))
        node.attributes.pop("allowzero", None)

    def expand(self, node: ir.Node) -> None:
        data, target = node.inputs[0], constant_array(node.inputs[1])
        if data is None or data not in self.axis:
            return
        if target is None:
            raise self._error(node, "computes its target shape at run time")
        place = self.axis[data] - len(self.old[data]) + len(target)
        if place >= 0:
            wanted = target.copy()
            wanted[place] = 1  # Expand keeps the size that the input has
            node.replace_input_with(1, self.op.constant(wanted))

    def resize(self, node: ir.Node) -> None:
        data = node.inputs[0]
        sizes = constant_array(node.inputs[3]) if len(node.inputs) > 3 else None
        if data is None or data not in self.axis or sizes is None or "axes" in node.attributes:
            return
        if len(node.inputs) > 1 and node.inputs[1] is not None:
            raise self._error(node, "has a region of interest (input roi)")
        # Only the other axes are resized, so the batch keeps any size.
        axes = [axis for axis in range(len(sizes)) if axis != self.axis[data]]
        node.attributes["axes"] = ir.AttrInt64s("axes", axes)
        node.replace_input_with(3, self.op.constant(sizes[axes]))

    def concat(self, node: ir.Node) -> None:
        carriers = [value for value in node.inputs if value is not None and value in self.axis]
        if not carriers:
            return
        carrier = carriers[0]
        batch = self.axis[carrier]
        # Along another axis the other inputs (a class token, say) must be repeated for each example.
        along = node.attributes["axis"].as_int() % len(self.old[carrier])
        if along != batch:
            for index, value in enumerate(node.inputs):
                if value is not None and value not in self.axis:
                    self._spread(node, index, batch, carrier, batch)

    def recurrent(self, node: ir.Node) -> None:
        data = node.inputs[0]
        if data is None or data not in self.axis:
            return
        layout = node.attributes.get("layout")
        first = layout is not None and layout.as_int() == 1
        # Inputs sequence_lens, initial_h and initial_c, and their batch axes.
        for index, axis in ((4, 0), (5, 0 if first else 1), (6, 0 if first else 1)):
            value = node.inputs[index] if index < len(node.inputs) else None
            if value is None or value in self.axis:
                continue
            content = constant_array(value)
            if index > 4 and content is not None and not content.any():
                node.replace_input_with(index, None)  # the operator starts from zeros by itself
            else:
                self._spread(node, index, axis, data, self.axis[data])

    def broadcast(self, node: ir.Node) -> None:
        carrier = next((value for value in node.inputs if value is not None and value in self.axis), None)
        if carrier is None:
            return
        # Broadcasting aligns shapes at the end. The last two axes of a matrix product do not broadcast.
        behind = len(self.old[carrier]) - self.axis[carrier]
        if node.op_type == "MatMul" and behind <= 2:
            return
        for index, value in enumerate(node.inputs):
            if value is None or value in self.axis or value in self.lost or len(self.old[value]) < behind:
                continue
            axis = len(self.old[value]) - behind
            if self.old[value][axis] != 1:
                node.replace_input_with(index, self._first(node, value, axis))

    def _spread(self, node: ir.Node, index: int, axis: int, carrier: ir.Value, carried: int) -> None:
        """Repeat an input that all examples share along `axis`, as often as axis `carried` of `carrier` is long."""
        value = node.inputs[index]
        if value is None:
            return
        shape = self.old[value]
        if self.shared.get(value) == axis:
            shape = tuple(self.size if place == axis else size for place, size in enumerate(shape))
        if shape[axis] != self.size or self.old[carrier][carried] != self.size or static_size(shape) is None:
            raise self._error(node, f"has an input {value.name!r} for a batch of {shape[axis]}")
        if self.size > 1:
            value = self._first(node, value, axis)
        count = self.op.Shape(carrier, start=carried, end=carried + 1)
        parts = [np.array([d], np.int64) if i != axis else count for i, d in enumerate(shape)]
        repeated = self.op.Expand(value, self.op.Concat(*parts, axis=0) if len(parts) > 1 else count)
        repeated.shape = ir.Shape([d if i != axis else self.size * _TIMES for i, d in enumerate(shape)])
        self.old[repeated], self.axis[repeated] = shape, axis
        node.replace_input_with(index, repeated)

    def _first(self, node: ir.Node, value: ir.Value, axis: int) -> ir.Value:
        """What a value that depends on no input has along `axis` for the first example, with 1 as the axis's size.

        Raises FixedBatchError if it is another one for other examples, as far as that shows without running the graph.
        """
        shape, content = self.old[value], constant_array(value)
        if self.shared.get(value) == axis:
            return value
        if shape[axis] != self.size:
            raise self._error(node, f"joins the batch with {value.name!r} of shape {list(shape)}")
        if content is None:
            first = self.op.Slice(value, [0], [1], [axis])
        else:
            row = content.take([0], axis)
            if not np.array_equal(content, np.broadcast_to(row, content.shape), equal_nan=content.dtype.kind == "f"):
                raise self._error(node, f"has an input {value.name!r} that is not the same for all examples")
            if value.name not in self.parameters:
                first = self.op.constant(row)
            else:
                # A weight that the exporter has repeated: it keeps its name, and becomes one row for all its readers.
                tensor = ir.tensor(np.ascontiguousarray(row), name=value.name)
                value.const_value, value.shape, self.shared[value] = tensor, ir.Shape(row.shape), axis
                first = value
        self.old[first] = tuple(1 if place == axis else size for place, size in enumerate(shape))
        return first


_FIXES: dict[str, Callable[[_Walk, ir.Node], None]] = {
    "Reshape": _Walk.reshape,
    "Expand": _Walk.expand,
    "Resize": _Walk.resize,
    "Concat": _Walk.concat,
    "LSTM": _Walk.recurrent,
    "GRU": _Walk.recurrent,
    "RNN": _Walk.recurrent,
    **dict.fromkeys(_BROADCASTING, _Walk.broadcast),
}
