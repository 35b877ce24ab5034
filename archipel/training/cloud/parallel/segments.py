"""A graph as segments that FSDP2 gathers one after the other, so that no process ever has all parameters at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from archipel.training.cloud.parallel.cuts import cut, movable
from archipel.training.cloud.planner.division import SEGMENT_BYTES, divide

if TYPE_CHECKING:
    import torch
    from torch import fx


class Segments(nn.Module):
    """The segments of a graph, run in their order; parameters are the same objects as the graph's.

    FSDP2 gathers a parameter for the module that has it. One that several segments read is therefore this module's own,
    and an input of each of them, behind what the segment before hands on.
    """

    def __init__(self, segments: Sequence[fx.GraphModule]) -> None:
        super().__init__()
        users = Counter(parameter for part in segments for parameter in part.parameters())
        names = {parameter: f"shared{i}" for i, parameter in enumerate(p for p, n in users.items() if n > 1)}
        self._given = [_take_out(part, names) for part in segments]
        for parameter, name in names.items():
            self.register_parameter(name, parameter)
        self.segments = nn.ModuleList(segments)

    def forward(self, *inputs: Any) -> Any:
        values: Any = inputs
        for segment, given in zip(self.segments, self._given):
            values = values if isinstance(values, tuple) else (values,)
            values = segment(*values, *(getattr(self, name) for name in given))
        return values


def segment(module: fx.GraphModule, least_bytes: int | None = None) -> Segments | None:
    """Cut a graph into segments of about so many bytes of parameters or more; None where there would be one alone.

    A parameter that several segments read counts for none of them.
    """
    nodes = movable(module)
    readers = [_parameters(module, node) for node in nodes]
    users = Counter(key for found in readers for key in found)
    weights = [sum(size for key, size in found.items() if users[key] == 1) for found in readers]
    least = SEGMENT_BYTES if least_bytes is None else least_bytes
    # As even as the largest operator lets them be.
    count = min(sum(weights) // max(max(weights, default=0), least, 1), sum(weight > 0 for weight in weights))
    called = Counter(key for node, found in zip(nodes, readers) if node.op == "call_module" for key in found)
    if count < 2 or any(users[key] > 1 for key in called):  # a module that is called has its parameters to itself
        return None
    return Segments(cut(module, [nodes[index].name for index in divide(weights, count)], alone=False))


def _take_out(part: fx.GraphModule, names: Mapping[nn.Parameter, str]) -> list[str]:
    """Let a segment take these parameters as inputs. Returns the names of those that it reads, in their order."""
    placeholders = [node for node in part.graph.nodes if node.op == "placeholder"]
    read = [(node, _attribute(part, node)) for node in part.graph.nodes if node.op == "get_attr"]
    inputs: dict[str, fx.Node] = {}
    for node, value in read:
        if isinstance(value, nn.Parameter) and value in names:
            name = names[value]
            if name not in inputs:
                last = [*placeholders, *inputs.values()]
                with part.graph.inserting_after(last[-1]):
                    inputs[name] = part.graph.placeholder(name)
            node.replace_all_uses_with(inputs[name])
            part.graph.erase_node(node)
            owner, _, field = str(node.target).rpartition(".")
            if hasattr(part.get_submodule(owner), field):  # read twice, it is taken out once
                delattr(part.get_submodule(owner), field)
    part.recompile()
    return list(inputs)


def _attribute(module: fx.GraphModule, node: fx.Node) -> Any:
    owner, _, name = str(node.target).rpartition(".")
    return getattr(module.get_submodule(owner), name)


def _parameters(module: fx.GraphModule, node: fx.Node) -> dict[int, int]:
    """Bytes of the parameters that a node reads, by their identity."""
    found: dict[int, int] = {}
    parameters: list[torch.Tensor] = []
    if node.op == "call_module":
        parameters += module.get_submodule(str(node.target)).parameters()
    for source in node.all_input_nodes:
        value = _attribute(module, source) if source.op == "get_attr" else None
        parameters += [value] if isinstance(value, nn.Parameter) else []
    for parameter in parameters:
        found[id(parameter)] = parameter.numel() * parameter.element_size()
    return found
