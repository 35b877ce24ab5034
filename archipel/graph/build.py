"""`Builder`: emits nodes into a graph, and names, types and shapes their results at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir

from archipel.graph.opset import OPSET
from archipel.graph.shapes import dims, dtype_of, infer_node, is_float, is_static, rank, same_shape
from archipel.graph.walk import bodies, levels

Operand = ir.Value | np.ndarray | np.generic | float | int | bool | Sequence[int] | None
"""An operator's input: a value, or a constant that becomes one. A Python float takes the type of the first
floating-point value among the inputs."""

Attribute = str | bytes | int | float | Sequence[int] | Sequence[float] | ir.TensorProtocol | ir.Graph | None
"""An operator's attribute; None: left out."""


class Emit(Protocol):
    """Emits nodes of one operator."""

    def __call__(self, *inputs: Operand, **attributes: Attribute) -> ir.Value: ...


class Outlined(Protocol):
    """Takes parts of a graph out of it; `graph/outline.py` makes functions of them."""

    def call(
        self,
        op: Builder,
        name: str,
        inputs: Sequence[ir.Value | None],
        body: Callable[..., Sequence[ir.Value]],
        attributes: Mapping[str, int | float | Sequence[int]],
    ) -> tuple[ir.Value, ...]: ...


class Builder:
    """Appends nodes of standard operators to `graph`; `op.Mul(a, b)` or `op("Mul", a, b)` returns the new value.

    Inputs are values, arrays or numbers (arrays and numbers become initializers, equal ones only once); None leaves an
    optional input out. Attributes are keyword arguments. `emit` is for operators with several outputs. ONNX's inference
    gives each result its type and shape; a node that it rejects raises GraphError.

    Arguments:
        graph: the graph to append to.
        scope: what the names of new nodes start with.
        outer: for the graph of a body, the builder of the graph around it; see `body`.

    Example:
        graph = model.ir.graph
        op = Builder(graph)
        y = op.Softmax(op.Mul(graph.outputs[0], np.float32(0.5)), axis=-1)
    """

    def __init__(self, graph: ir.Graph, scope: str = "", *, outer: Builder | None = None) -> None:
        self.graph = graph
        self._scope = scope
        self._after: ir.Node | None = None
        self._before: ir.Node | None = None
        # A body's constants are initializers of the main graph, one place for all; `lower_initializers` moves them.
        # Names are unique across all levels: inference and runtimes resolve a body's names in the graphs around it.
        self._root: Builder = self if outer is None else outer._root
        self._names: set[str] = _names_in(graph) if outer is None else outer._names
        self._constants: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}
        self._outlined: Outlined | None = None

    @property
    def main(self) -> ir.Graph:
        """The graph around all bodies; the builder's own, if it is none of a body."""
        return self._root.graph

    def __getattr__(self, op_type: str) -> Emit:
        if not op_type[:1].isupper():
            raise AttributeError(op_type)
        return partial(self, op_type)

    def __call__(self, op_type: str, *inputs: Operand, **attributes: Attribute) -> ir.Value:
        (value,) = self.emit(op_type, *inputs, outputs=1, **attributes)
        return value

    def emit(self, op_type: str, *inputs: Operand, outputs: int, **attributes: Attribute) -> tuple[ir.Value, ...]:
        """As a call of the builder, but with `outputs` results, as a tuple."""
        values = self._values(inputs)
        name = self.title(op_type)
        results = [ir.Value(name=name if i == 0 else self.unique(f"{name}:{i}")) for i in range(outputs)]
        given = {key: value for key, value in attributes.items() if value is not None}
        node = ir.Node("", op_type, values, ir.convenience.convert_attributes(given), outputs=results, name=name)
        if not bodies(node):
            infer_node(node, OPSET)  # not for a node with a body: the caller sets the shapes of its results
        self.insert(node)
        return tuple(results)

    def insert(self, node: ir.Node) -> None:
        """Put a node where the next one goes: at the graph's end, or as `after` and `before` say."""
        if self._after is not None:
            self.graph.insert_after(self._after, node)
            self._after = node  # the next one comes behind this one
        elif self._before is not None:
            self.graph.insert_before(self._before, node)
        else:
            self.graph.append(node)

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """A context: names of nodes emitted inside start with `name`."""
        before, self._scope = self._scope, name
        try:
            yield
        finally:
            self._scope = before

    def part(self, name: str) -> AbstractContextManager[None]:
        """A context: as `scope`, below the present one."""
        return self.scope(f"{self._scope}/{name}" if self._scope else name)

    @contextmanager
    def after(self, node: ir.Node) -> Iterator[None]:
        """A context: nodes emitted inside are inserted right after `node`, in order, not at the end of the graph."""
        outside, self._after = self._after, node
        try:
            yield
        finally:
            self._after = outside

    @contextmanager
    def before(self, node: ir.Node) -> Iterator[None]:
        """A context: nodes emitted inside are inserted right before `node`, in order."""
        # `emit` looks at `_after` first, so an outer `after` has to be off for the time.
        outside, self._before, self._after = (self._before, self._after), node, None
        try:
            yield
        finally:
            self._before, self._after = outside

    def body(self, name: str) -> Builder:
        """A builder of a new body, for Scan, Loop and If; the body may read this graph's values."""
        return Builder(ir.Graph([], [], nodes=[], name=self.unique(name)), name, outer=self)

    def title(self, name: str) -> str:
        """An unused name for a node of this kind, in the present scope; taken from then on."""
        return self.unique(f"{self._scope}/{name}" if self._scope else name)

    @property
    def outlined(self) -> Outlined | None:
        """What `outline` keeps out of the graph; None, as by default: nothing."""
        return self._root._outlined

    @outlined.setter
    def outlined(self, outlined: Outlined | None) -> None:
        self._root._outlined = outlined

    def unique(self, name: str) -> str:
        """`name`, or `name_2`, `name_3`, ... if it is taken; taken from then on."""
        candidate, count = name, 1
        while candidate in self._names:
            count += 1
            candidate = f"{name}_{count}"
        self._names.add(candidate)
        return candidate

    def input(self, name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
        """Add a graph input of this type and shape: numbers, and names for symbolic sizes."""
        self._names.add(name)
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        self.graph.inputs.append(value)
        return value

    def initializer(self, name: str, content: np.ndarray) -> ir.Value:
        """Add an initializer of its own with this content, whose name begins with `name`."""
        tensor = ir.tensor(np.ascontiguousarray(content) if content.ndim else content, name=self.unique(name))
        value = ir.Value(
            name=tensor.name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(content.shape), const_value=tensor
        )
        self.graph.register_initializer(value)
        return value

    def constant(self, content: Any, dtype: ir.DataType | None = None) -> ir.Value:
        """The initializer with this content, the same for all who ask; ints are int64 unless `dtype` says otherwise."""
        array = np.asarray(content, None if dtype is None else dtype.numpy())
        # NumPy makes float64 of an empty list; here that is a list of no axes or sizes.
        if array.size == 0 and dtype is None and array.dtype == np.float64:
            array = array.astype(np.int64)
        key = (array.dtype.str, array.shape, array.tobytes())
        root = self._root
        value = root._constants.get(key)
        if value is None or value.graph is not root.graph:  # a pass may have removed the initializer since
            root._constants[key] = value = root.initializer("const", array)
        return value

    def name_output(self, value: ir.Value, name: str) -> ir.Value:
        """Make `value` a graph output called `name`; returns it, or an Identity of it.

        An input, initializer or other output keeps its name, and a body's output must come from a node of the body.
        """
        producer = value.producer()
        if producer is None or producer.graph is not self.graph or value.is_graph_output() or value.is_graph_input():
            value = self.Identity(value)
        self._names.add(name)
        value.name = name
        self.graph.outputs.append(value)
        return value

    def reserve(self, graph: ir.Graph) -> None:
        """Take all names of another graph, whose values are to come into this one under their names."""
        self._names.update(_names_in(graph))

    def free_name(self, name: str) -> None:
        """Rename an inner value that uses `name`, so that an input or output can have it."""
        if name not in self._names:
            return
        for node in self.graph.all_nodes():
            for value in node.outputs:
                if value.name == name and not value.is_graph_output():
                    value.name = self.unique(f"{name}_inner")

    # The methods below use constants where shapes are fixed, and read shapes at run time only where they are not.

    def shape_of(self, value: ir.Value, free: int = 0) -> ir.Value:
        """The value's shape, int64 [rank]: a constant if it is fixed, else a Shape node.

        With `free` = 1, for a Reshape's target, a constant also for one symbolic size, which is -1 there.
        """
        shape = dims(value)
        if is_static(shape):
            return self.constant(np.array(shape, np.int64))
        if free and sum(not isinstance(d, int) for d in shape) == 1 and 0 not in shape:
            return self.constant(np.array([d if isinstance(d, int) else -1 for d in shape], np.int64))
        return self.Shape(value)

    def reshape_like(self, value: ir.Value, like: ir.Value) -> ir.Value:
        """`value` in the shape of `like`, which has as many elements."""
        if same_shape(dims(value), dims(like)):
            return value
        target = self.shape_of(like, free=1)
        # Without allowzero a 0 in the target means "as in the input"; sizes read at run time may be 0.
        allowzero = 1 if 0 in dims(like) or not target.is_initializer() else None
        result = self.Reshape(value, target, allowzero=allowzero)
        result.shape = like.shape
        return result

    def expand_like(self, value: ir.Value, like: ir.Value) -> ir.Value:
        """`value` broadcast to the shape of `like`."""
        if same_shape(dims(value), dims(like)):
            return value
        result = self.Expand(value, self.shape_of(like))
        result.shape = like.shape
        return result

    def full_like(self, like: ir.Value, fill: float) -> ir.Value:
        """A tensor filled with `fill`, of the shape and type of `like`."""
        dtype = dtype_of(like)
        content = ir.tensor(np.array([fill], dtype.numpy()))
        result = self.ConstantOfShape(self.shape_of(like), value=content)
        result.shape = like.shape
        return result

    def sum_to(self, value: ir.Value, like: ir.Value) -> ir.Value:
        """Sum `value` over the axes along which broadcasting repeats `like`: the adjoint of broadcasting."""
        have, want = dims(value), dims(like)
        if same_shape(have, want):
            return value
        # Broadcasting aligns shapes at the end: it repeats `like` along `lead` new axes and along its axes of size 1.
        lead = len(have) - len(want)
        pairs = list(enumerate(zip(have[lead:], want), start=lead))
        # A symbolic size that is not certainly equal may be 1 at run time, and then it was repeated.
        if any(w != 1 and not (w is not None and w == h) for _, (h, w) in pairs):
            return self._sum_to_at_runtime(value, like, lead)
        axes = [*range(lead), *(i for i, (h, w) in pairs if w == 1 and h != 1)]
        if lead == 0:
            result = self.ReduceSum(value, axes, keepdims=1)
        elif axes == list(range(lead)):
            result = self.ReduceSum(value, axes, keepdims=0)
        else:
            result = self.reshape_like(self.ReduceSum(value, axes, keepdims=1), like)
        result.shape = like.shape
        return result

    def _sum_to_at_runtime(self, value: ir.Value, like: ir.Value, lead: int) -> ir.Value:
        # The axes whose sizes differ at run time were repeated. No such axis: noop_with_empty_axes, as ReduceSum would
        # reduce all without it.
        have, want = self.Shape(value), self.Shape(like)
        padded = want
        if lead:
            padded = self.Concat(self.constant(np.ones(lead, np.int64)), want, axis=0)
        repeated = self.Not(self.Equal(have, padded))
        axes = self.Reshape(self.NonZero(repeated), [-1])
        total = self.ReduceSum(value, axes, keepdims=1, noop_with_empty_axes=1)
        total.shape = ir.Shape([None] * len(dims(value)))
        result = self.Reshape(total, want, allowzero=1)
        result.shape = like.shape
        return result

    def swap_last(self, value: ir.Value) -> ir.Value:
        """Transpose the last two axes."""
        n = rank(value)
        return self.Transpose(value, perm=[*range(n - 2), n - 1, n - 2])

    def _values(self, inputs: Sequence[Operand]) -> list[ir.Value | None]:
        # So `op.Mul(x, 0.5)` works for any type of x, as operators take no mixture of types.
        like = next((v.dtype for v in inputs if isinstance(v, ir.Value) and is_float(v)), None)
        values: list[ir.Value | None] = []
        for operand in inputs:
            if operand is None or isinstance(operand, ir.Value):
                values.append(operand)
            elif isinstance(operand, np.ndarray | np.generic):
                values.append(self.constant(operand))
            elif isinstance(operand, float):
                values.append(self.constant(operand, like))
            else:
                values.append(self.constant(np.array(operand, bool if isinstance(operand, bool) else np.int64)))
        return values


def _names_in(graph: ir.Graph) -> set[str]:
    names: set[str] = set()
    for level in levels(graph):
        names.update(value.name for value in level.inputs if value.name)
        names.update(level.initializers)
    for node in graph.all_nodes():
        names.update(value.name for value in node.outputs if value.name)
        if node.name:
            names.add(node.name)
    return names
