"""From an ONNX graph to a torch.fx graph: every node is lowered once, in the graph's order.

A value of the graph is, while it is traced, one of three things: a `torch.Tensor` (a constant), `Sizes` (numbers that
follow from shapes), or a `torch.fx.Proxy` (a tensor that the module computes).
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import onnx_ir as ir
import torch
from torch import fx, nn

from archipel.errors import TrainingError
from archipel.graph.shapes import constant_array, dims, dtype_of, fixed_sizes, is_static
from archipel.graph.walk import bodies, captured_values
from archipel.training.cloud.graphs.fusing import find_fusions
from archipel.training.cloud.graphs.own_rules import has_own_rule
from archipel.training.cloud.graphs.stepping import ONNX_NODE, VALUES, SteppedModule
from archipel.training.cloud.ops import NodeContext, find_lowering
from archipel.training.cloud.ops.bodies import NUMBER, Body, Given
from archipel.training.cloud.ops.sizes import Sizes, compute_sizes, make_tensor
from archipel.training.cloud.ops.types import OUTSIDE, hold, to_torch, torch_dtype

NODES = "_nodes"
"""The attribute of a traced module below which its modules without parameters and its bodies lie."""

CONSTANTS = "_constants"
"""The attribute of a traced module below which its constants lie."""

_MOST_CONSTANT = 2**22  # elements that are computed once, when the graph is traced, and kept

_READ = ("self", "torch", "math", "inf", "nan", "device")  # names that written code reads

OwnRule = Callable[[ir.Node], nn.Module]


class _Tracer(fx.proxy.GraphAppendingTracer):
    """Notes for each traced node which ONNX node it belongs to."""

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__(graph)
        self.current: ir.Node | None = None

    def create_node(self, *arguments: Any, **named: Any) -> fx.Node:
        node = super().create_node(*arguments, **named)
        if self.current is not None:
            node.meta[ONNX_NODE] = self.current
        return node


class Trace:
    """The lowering of one graph, or of one body.

    Attributes:
        graph: what has been traced.
        values: what each value of the ONNX graph is.
        contents: what the traced module holds, by its path: constants, modules and bodies.
    """

    def __init__(self, stored: Mapping[ir.Value, str] | None = None, own_rule: OwnRule | None = None) -> None:
        """Begin with nothing.

        Arguments:
            stored: initializers that are parameters or buffers of the module, with their paths in it.
            own_rule: makes the module for a call of a function that has a gradient rule of its own.
        """
        self.graph = fx.Graph()
        self.values: dict[ir.Value, torch.Tensor | Sizes | fx.Proxy] = {}
        self.contents: dict[str, Any] = {f"{CONSTANTS}.device": torch.empty(0)}
        # Integers that are held as floating-point numbers, so that their gradient passes straight through.
        self.reals: set[ir.Value] = set()
        self._tracer = _Tracer(self.graph)
        self._arguments: set[str] = set()
        self._stored = dict(stored or {})
        self._own_rule = own_rule
        self._loaded: dict[int, fx.Proxy] = {}  # constants that are attributes already, by identity
        self._device: fx.Proxy | None = None
        self._kept: list[torch.Tensor] = []  # as long as their identities are keys

    def run(self, graph: ir.Graph) -> None:
        """Lower a main graph: placeholders for its inputs, one tensor or a tuple of its outputs."""
        self._initializers(graph)
        for value in graph.inputs:
            self.values[value] = self._enter(value, self.placeholder(str(value.name)))
        self._lower(graph)
        outputs = [self._leave(value, self.tensor(value)) for value in graph.outputs]
        self.graph.output(_raw(outputs[0]) if len(outputs) == 1 else tuple(map(_raw, outputs)))
        # Modules stay: BatchNormalization moves its statistics.
        self.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output", "call_module"))

    def _enter(self, value: ir.Value, given: Any) -> Any:
        """An input of an unsigned type in the type that holds it; callers may give either."""
        dtype = dtype_of(value)
        torch_dtype(dtype)  # refuses what PyTorch cannot hold
        return self.call(hold, (given, dtype)) if dtype in OUTSIDE else given

    def _leave(self, value: ir.Value, tensor: Any) -> Any:
        dtype = dtype_of(value)
        return tensor.to(OUTSIDE[dtype]) if dtype in OUTSIDE else tensor

    def placeholder(self, name: str) -> fx.Proxy:
        # An argument's name in the code that torch.fx writes, which reads globals such as `torch`.
        cleaned = re.sub(r"\W", "_", name, flags=re.ASCII)
        if not cleaned.isidentifier() or keyword.iskeyword(cleaned) or hasattr(builtins, cleaned) or cleaned in _READ:
            cleaned = f"input_{cleaned}"
        while cleaned in self._arguments:
            cleaned += "_"
        self._arguments.add(cleaned)
        node = self._tracer.create_node("placeholder", cleaned, (), {})
        node.meta[VALUES] = [name]
        return self._proxy(node)

    # What lowerings ask

    def tensor(self, value: ir.Value, constant: bool = False, real: bool = False) -> Any:
        """The value as a tensor: a Proxy, or with `constant` the content of a constant.

        With `real` integers stay floating-point numbers, if they are held as such.
        """
        found = self.values.get(value)
        if found is None:
            if value not in self._stored:
                raise TrainingError(f"the value {value.name!r} is read before it is computed")
            # Loaded where it is first read, once.
            found = self.values[value] = self._attribute(self._stored[value])
        if isinstance(found, Sizes):
            dtype = torch_dtype(dtype_of(value))
            if found.fixed:
                found = self.values[value] = found.as_constant(dtype)
            else:
                return self.call(make_tensor, (found.items, found.rank, dtype, self.device()))
        if isinstance(found, torch.Tensor) and not constant:
            return self.add_constant(found)
        return found.to(torch_dtype(dtype_of(value))) if value in self.reals and not real else found

    def sizes(self, value: ir.Value, reader: ir.Node) -> Sizes:
        """The value, of rank 0 or 1, as sizes. Raises TrainingError where not even its length is known."""
        found = self.values.get(value)
        if isinstance(found, Sizes):
            return found
        if isinstance(found, torch.Tensor):
            return Sizes(found.reshape(-1).tolist(), found.ndim)
        shape = dims(value)
        if len(shape) > 1 or not is_static(shape):
            raise TrainingError(
                f"{reader.op_type} {reader.name!r}: the length of {value.name!r} is not known, which says how many "
                "axes the result has; export the model with a fixed number of axes"
            )
        # Computed as a tensor: the module has to read it.
        tensor = self.tensor(value)
        if not shape:
            return Sizes([tensor.item()], 0)
        return Sizes([tensor[i].item() for i in range(*fixed_sizes(shape))], 1)

    def size(self, value: ir.Value, axis: int) -> Any:
        """The size of an axis: a number where the graph knows it, else read from the tensor."""
        known = dims(value)[axis]
        return known if isinstance(known, int) else self.tensor(value, real=True).size(axis)

    def device(self) -> Any:
        """The module's device, as a Proxy."""
        if self._device is None:
            self._device = self._attribute(f"{CONSTANTS}.device").device
        return self._device

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        node = self._tracer.create_node("call_function", function, _raw(arguments), {})
        return self._proxy(node)

    def call_module(self, node: ir.Node, module: nn.Module, arguments: tuple[Any, ...]) -> Any:
        return self._proxy(self._tracer.create_node("call_module", self._add_module(node, module), _raw(arguments), {}))

    def add_constant(self, tensor: torch.Tensor) -> fx.Proxy:
        """A constant as a buffer of the module; one that is added again is the same."""
        if id(tensor) not in self._loaded:
            path = f"{CONSTANTS}.c{len(self._loaded)}"
            self.contents[path] = tensor
            self._kept.append(tensor)
            self._loaded[id(tensor)] = self._attribute(path)
        return self._loaded[id(tensor)]

    def body(self, node: ir.Node, name: str, given: Mapping[ir.Value, Given]) -> Body:
        """A body of the node as a module; `given` says what inputs of the body are, other than tensors."""
        body = node.attributes[name].as_graph()
        inner = Trace(own_rule=self._own_rule)
        inner._initializers(body)
        number = None
        for value in body.inputs:
            fixed = given.get(value)
            if isinstance(fixed, torch.Tensor):
                inner.values[value] = fixed
                continue
            inner.values[value] = inner.placeholder(str(value.name))
            if fixed is NUMBER:
                number = value
                inner.values[value] = Sizes([inner.values[value]], len(value.shape or ()))
        read = Counter(captured_values(body))
        sequences: dict[tuple[ir.Value, int], Any] = {}
        for reader in body:
            if number is None or not self._reads_item(reader, number, read):
                continue
            data = reader.inputs[0]
            assert data is not None
            key = data, reader.attributes.get_int("axis", 0) % len(dims(data))
            if key not in sequences:
                sequences[key] = inner.placeholder("item")
            inner.values[reader.outputs[0]] = sequences[key]
            read[data] -= 1
        captured: list[Any] = []
        for value in (value for value, times in read.items() if times):
            found = self.values.get(value)
            if isinstance(found, torch.Tensor) or (isinstance(found, Sizes) and found.fixed):
                inner.values[value] = found
            elif isinstance(found, Sizes):
                inner.values[value] = Sizes([inner.placeholder("size") for _ in found.items], found.rank)
                captured.extend(found.items)
            else:
                inner.values[value] = inner.placeholder(str(value.name))
                captured.append(self.tensor(value))
        inner._lower(body)
        inner.graph.output(tuple(_raw(inner.tensor(value)) for value in body.outputs))
        module = SteppedModule(inner.contents, inner.graph, class_name="Body")
        forget_constants(module)
        read_along = [(self.tensor(value), axis) for value, axis in sequences]
        return Body(self._attribute(self._add_module(node, module)), read_along, captured)

    def _reads_item(self, node: ir.Node, number: ir.Value, captured: Mapping[ir.Value, int]) -> bool:
        """Whether a node of a loop's body reads one item of a tensor around the loop, in each iteration the next."""
        if (node.domain, node.op_type) != ("", "Gather") or node.inputs[1] is not number or number.shape:
            return False
        data = node.inputs[0]
        assert data is not None
        return captured.get(data, 0) > 0 and not isinstance(self.values.get(data), torch.Tensor | Sizes)

    # The sweep

    def _initializers(self, graph: ir.Graph) -> None:
        for value in graph.initializers.values():
            if value not in self._stored and not value.is_graph_input():
                content = constant_array(value)
                if content is None:
                    raise TrainingError(f"the initializer {value.name!r} has no value")
                self.values[value] = to_torch(content)

    def _lower(self, graph: ir.Graph) -> None:
        fusions = find_fusions(graph)
        covered = {node for fusion in fusions.values() for node in fusion.covered}
        for node in graph:
            if node.outputs and node.outputs[0] in self.values:
                continue  # an item that the loop hands in
            if node in covered:
                continue
            self._tracer.current = node
            found = fusions[node].lower(self) if node in fusions else self._outputs(node)
            results = found if isinstance(found, tuple | list) else (found,)
            for value, result in zip(node.outputs, results):
                self.values[value] = result
                if isinstance(result, fx.Proxy):
                    result.node.meta.setdefault(VALUES, []).append(str(value.name))
        self._tracer.current = None

    def _outputs(self, node: ir.Node) -> Any:
        if node.op_type == "Constant" and node.domain == "":
            content = constant_array(node.outputs[0])
            if content is None:
                raise TrainingError(f"Constant {node.name!r} holds no tensor")
            return to_torch(content)
        sizes = compute_sizes(self, node)
        if sizes is not None:
            return sizes
        if self._own_rule is not None and has_own_rule(node.domain, node.op_type):
            given = tuple(self.tensor(value) for value in node.inputs if value is not None)
            found = self.call_module(node, self._own_rule(node), given)
            return [found[i] for i in range(len(node.outputs))] if len(node.outputs) > 1 else found
        lower = find_lowering(node)
        if self._is_constant(node):
            with torch.no_grad():
                return lower(NodeContext(self, node, constant=True))
        return lower(NodeContext(self, node))

    def _is_constant(self, node: ir.Node) -> bool:
        """Whether the node computes the same each time, from constants alone, and not too much."""
        if bodies(node) or node.op_type.startswith("Random") or node.op_type in ("Dropout", "Bernoulli", "Multinomial"):
            return False
        for value in node.inputs:
            if value is None:
                continue
            found = self.values.get(value)
            if not (isinstance(found, torch.Tensor) or (isinstance(found, Sizes) and found.fixed)):
                return False
        for value in node.outputs:
            if value.shape is None or not is_static(dims(value)):
                continue
            size = 1
            for number in fixed_sizes(dims(value)):
                size *= number
            if size > _MOST_CONSTANT:
                return False
        return True

    def _add_module(self, node: ir.Node, module: nn.Module) -> str:
        path = f"{NODES}.{node.op_type}_{sum(key.startswith(NODES) for key in self.contents)}"
        self.contents[path] = module
        return path

    def _attribute(self, path: str) -> fx.Proxy:
        return self._proxy(self._tracer.create_node("get_attr", path, (), {}))

    def _proxy(self, node: fx.Node) -> fx.Proxy:
        return fx.Proxy(node, self._tracer)


def forget_constants(module: nn.Module) -> None:
    """Leave the constants of a traced module out of its `state_dict`: the graph has them."""
    holder = getattr(module, CONSTANTS, None)
    if holder is not None:
        holder._non_persistent_buffers_set.update(holder._buffers)


def _raw(value: Any) -> Any:
    """Nodes in place of their Proxies, in tuples and lists too."""
    if isinstance(value, fx.Proxy):
        return value.node
    if isinstance(value, tuple | list):
        return type(value)(map(_raw, value))
    return value
