"""A TorchModule's graph rewritten so that each process runs its part of each operator, as a plan divides them.

Operators run on local tensors. Where a value lies otherwise than its reader wants it, the graph gets a `Move`: the
redistribution of a DTensor, whose gradient is redistributed on the way back.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from archipel.training.cloud.graphs.stepping import ONNX_NODE, VALUES
from archipel.training.cloud.parallel.cuts import keep_state
from archipel.training.cloud.planner.costs import Operand, Tensor, Unit
from archipel.training.cloud.planner.shardings import SUM, WHOLE, Layout, Strategy


@dataclass(frozen=True)
class Part:
    """What is computed by the traced nodes of one ONNX node: one unit, or several that PyTorch has one function for."""

    units: tuple[Unit, ...]
    reads: Mapping[str, tuple[Layout, Layout]]  # of a value or parameter: its layout, and its gradient's
    writes: Mapping[str, Layout]
    reshaped: Layout  # the axis of a reshape's result that is divided
    grouped: bool  # a convolution of which each process has some of the groups
    summed: bool  # the result is a SUM, to which each process adds its part of the bias


def placement(layout: Layout) -> Placement:
    """A layout as torch.distributed.tensor names it."""
    if layout == SUM:
        return Partial()
    return Replicate() if layout == WHOLE else Shard(layout)


class Move(nn.Module):
    """Lays a value otherwise: it lies as `before` and becomes `after`; its gradient arrives laid as `gradient`."""

    def __init__(self, mesh: DeviceMesh, before: Layout, after: Layout, gradient: Layout) -> None:
        super().__init__()
        self.mesh = mesh
        self.before, self.after, self.gradient = map(placement, (before, after, gradient))

    def forward(self, local: torch.Tensor) -> torch.Tensor:
        laid = DTensor.from_local(local, self.mesh, [self.before], run_check=False)
        return laid.redistribute(placements=[self.after]).to_local(grad_placements=[self.gradient])


def local_part(parameter: DTensor, gradient: Layout) -> torch.Tensor:
    """This process's part of a parameter, whose gradient comes laid as `gradient`."""
    return parameter.to_local(grad_placements=[placement(gradient)])


class _Summand(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: torch.Tensor, n: int) -> torch.Tensor:
        return value / n

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        return gradients[0], None


def summand(value: torch.Tensor, n: int) -> torch.Tensor:
    """1 / n of a value that n processes add up; the gradient of their sum is that of the value."""
    result: torch.Tensor = _Summand.apply(value, n)  # type: ignore[no-untyped-call]
    return result


def rewrite(
    module: fx.GraphModule, units: Sequence[Unit], strategies: Mapping[str, Strategy], mesh: DeviceMesh
) -> fx.GraphModule:
    """The module with divided operators. Its parameters must become DTensors laid as `parameter_layouts` says.

    The module itself gets the `Move`s too, and is not to be used any more.

    Arguments:
        module: a TorchModule.
        units: of `planner.costs` for the module's model.
        strategies: for each unit, by name.
        mesh: of one axis, the group of processes.
    """
    n = mesh.size()
    parts = _parts(module, units, strategies)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    moved: dict[tuple[Any, ...], fx.Node] = {}
    layouts: dict[fx.Node, Layout] = {}  # of the nodes whose values other parts read

    def laid(node: fx.Node, after: Layout, gradient: Layout) -> fx.Node:
        before = layouts.get(node, WHOLE)
        # What the caller gives has no gradient.
        if before == after and (gradient == before or node.op == "placeholder"):
            return copies[node]
        key = (node, after, gradient)
        if key not in moved:
            path = f"_moves.m{len(moved)}"
            module.add_submodule(path, Move(mesh, before, after, gradient))
            moved[key] = graph.call_module(path, (copies[node],))
        return moved[key]

    for node in module.graph.nodes:
        if node.op == "output":
            graph.output(fx.map_arg(node.args[0], lambda value: laid(value, WHOLE, WHOLE)))
            continue
        if node.op == "get_attr":
            copies[node] = graph.node_copy(node, lambda value: copies[value])
            continue
        part = parts.get(_key(node))

        def argument(value: fx.Node, node: fx.Node = node, part: Part | None = part) -> fx.Node:
            if value.op == "get_attr":
                parameter = _parameter(module, value)
                if parameter is None:
                    return copies[value]
                gradient = WHOLE
                readers = [part] if part is not None else [parts[k] for k in _reading_parts(node, parts)]
                for reader in readers:
                    if parameter in reader.reads:
                        gradient = reader.reads[parameter][1]
                key = (value, gradient)
                if key not in moved:
                    moved[key] = graph.call_function(local_part, (copies[value], gradient))
                if part is not None and part.summed and part.reads.get(parameter, (0, 0))[0] == WHOLE:
                    return graph.call_function(summand, (moved[key], n))
                return moved[key]
            names = _names(value)
            if part is None or not names or _key(value) == _key(node):
                return copies[value]
            for name in names:
                if name in part.reads:
                    return laid(value, *part.reads[name])
            return copies[value]

        copies[node] = graph.node_copy(node, argument)
        copies[node].meta.pop(VALUES, None)
        is_size = node.op == "call_method" and node.target == "size" and len(node.args) == 2
        if is_size and part is None and layouts.get(node.args[0], WHOLE) == node.args[1]:
            copies[node] = graph.call_function(operator.mul, (copies[node], n))
        if part is not None:
            if part.grouped and len(node.args) > 6:
                arguments: tuple[Any, ...] = copies[node].args
                copies[node].args = (*arguments[:6], arguments[6] // n)
            if part.reshaped >= 0:
                _divide_size(graph, copies[node], part.reshaped, n)
            for name in _names(node):
                if name in part.writes:
                    layouts[node] = part.writes[name]
    result = fx.GraphModule(module, graph)
    keep_state(module, [result])
    return result


def parameter_layouts(units: Iterable[Unit], strategies: Mapping[str, Strategy]) -> dict[str, Layout]:
    """How each parameter that a unit reads lies, by its name in the graph."""
    found = {}
    for unit in units:
        for read, layout in zip(unit.reads, strategies[unit.name].reads):
            if isinstance(read, Operand):
                found[read.parameter.name] = layout
    return found


def _key(node: fx.Node) -> str:
    """The name of the ONNX node that a traced node belongs to."""
    traced = node.meta.get(ONNX_NODE)
    return "" if traced is None else str(traced.name or traced.outputs[0].name)


def _names(node: fx.Node) -> tuple[str, ...]:
    """The ONNX values that a traced node computes or, as an input, is."""
    return tuple(node.meta.get(VALUES, ()))


def _parts(module: fx.GraphModule, units: Sequence[Unit], strategies: Mapping[str, Strategy]) -> dict[str, Part]:
    """Parts by the names of all ONNX nodes of their units."""
    shown = {name for node in module.graph.nodes for name in _names(node)}
    maker = {written.name: unit for unit in units for written in unit.writes}
    keys = {_key(node) for node in module.graph.nodes}
    parts: dict[str, Part] = {}
    for unit in units:
        if not keys.intersection(unit.nodes):
            continue  # part of a function that stands for several
        group, waiting = [unit], [unit]
        while waiting:
            for _, read in waiting.pop().activations:
                source = maker.get(read.name)
                if read.name not in shown and source is not None and source not in group:
                    group.append(source)
                    waiting.append(source)
        part = _join(group, strategies)
        parts.update(dict.fromkeys(unit.nodes, part))
    return parts


def _join(group: Sequence[Unit], strategies: Mapping[str, Strategy]) -> Part:
    """One part of the units of a function; undivided if values would have to move inside it."""
    reads: dict[str, tuple[Layout, Layout]] = {}
    written = {t.name: strategies[unit.name].writes[i] for unit in group for i, t in enumerate(unit.writes)}
    even = True
    for unit in group:
        strategy = strategies[unit.name]
        for read, layout, gradient in zip(unit.reads, strategy.reads, strategy.gradients):
            if isinstance(read, Operand):
                reads[read.parameter.name] = (layout, gradient)
            elif isinstance(read, Tensor):
                if read.name in written:
                    even &= written[read.name] == layout == gradient
                else:
                    even &= reads.setdefault(read.name, (layout, gradient)) == (layout, gradient)
    if not even:
        reads = dict.fromkeys(reads, (WHOLE, WHOLE))
        written = dict.fromkeys(written, WHOLE)
    first = group[0]
    axis = written[first.writes[0].name]
    reshapes = first.op_type in ("Reshape", "Flatten") and axis >= 0
    grouped = first.op_type == "Conv" and strategies[first.name].name == "axis 1"
    return Part(tuple(group), reads, written, axis if reshapes else WHOLE, grouped, axis == SUM)


def _parameter(module: fx.GraphModule, node: fx.Node) -> str | None:
    """The name in the graph of the parameter that a get_attr loads; None for a buffer or module."""
    value: Any = module
    for part in str(node.target).split("."):
        value = getattr(value, part)
    if not isinstance(value, torch.nn.Parameter):
        return None
    paths: Mapping[str, str] = getattr(module, "_paths", {})
    return next((name for name, path in paths.items() if path == node.target), str(node.target))


def _reading_parts(node: fx.Node, parts: Mapping[str, Part]) -> list[str]:
    """Parts that read what is made of a parameter by nodes that belong to none: a weight that is turned."""
    found, waiting = [], list(node.users)
    while waiting:
        user = waiting.pop()
        if _key(user) in parts:
            found.append(_key(user))
        else:
            waiting.extend(user.users)
    return found


def _divide_size(graph: fx.Graph, node: fx.Node, axis: int, n: int) -> None:
    """Let a reshape make this process's part: the size of the divided axis, if the graph states it, is 1 / n."""
    for place, argument in enumerate(node.args):
        if isinstance(argument, list | tuple) and axis < len(argument):
            size = argument[axis]
            if isinstance(size, int) and size > 0:
                size = size // n
            elif isinstance(size, fx.Node):
                with graph.inserting_before(node):
                    size = graph.call_function(operator.floordiv, (size, n))
            sizes = [*argument[:axis], size, *argument[axis + 1 :]]
            node.args = (*node.args[:place], sizes, *node.args[place + 1 :])
            return
