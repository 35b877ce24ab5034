"""A torch.fx graph cut into stages that run one after the other, each a module with the parameters that it reads."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from archipel.errors import TrainingError

if TYPE_CHECKING:
    from torch import fx


# What computes with sizes that are numbers.
_OF_NUMBERS = (operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv, operator.neg, max, min)


def movable(module: fx.GraphModule) -> list[fx.Node]:
    """The nodes that lie in one stage: all but inputs, outputs, attributes, and numbers that follow from shapes."""
    light = {node for node in module.graph.nodes if node.op == "get_attr"}
    for node in module.graph.nodes:  # sizes and devices, which a stage reads again from tensors that it has
        reads_size = node.op == "call_method" and node.target in ("size", "dim")
        known = node.op == "call_function" and node.args and light.issuperset(node.all_input_nodes)
        if reads_size or (known and (node.target is getattr or node.target in _OF_NUMBERS)):
            light.add(node)
    return [node for node in module.graph.nodes if node.op not in ("placeholder", "output") and node not in light]


def cut(module: fx.GraphModule, starts: Sequence[str], alone: bool = True) -> list[fx.GraphModule]:
    """Cut a graph before each of the nodes named in `starts`.

    Stage i takes what stage i - 1 returns, the first one the graph's inputs; the last one returns the graph's outputs.
    A stage hands on what later stages read, in the order of the graph. Attributes keep their names, and parameters stay
    the same objects.

    Arguments:
        module: any graph.
        starts: names of nodes.
        alone: whether each stage is for a process of its own: it sends what it hands on, and shares no parameter.

    Raises TrainingError if a name is no node, or two stages would read one parameter and may not.
    """
    import torch
    from torch import fx

    from archipel.training.cloud.parallel.contiguous import contiguous

    nodes = movable(module)
    light = set(module.graph.nodes).difference(nodes)
    light = {node for node in light if node.op not in ("placeholder", "output")}
    places = {node.name: index for index, node in enumerate(nodes)}
    unknown = [name for name in starts if places.get(name, 0) == 0]
    if unknown:
        raise TrainingError(
            f"cannot cut the graph before {unknown[0]!r}: it is the first of its nodes, or none of them"
        )
    edges = [0, *sorted(places[name] for name in starts), len(nodes)]
    result = next(node for node in module.graph.nodes if node.op == "output")
    stage_of = {node: stage for stage, (a, b) in enumerate(pairwise(edges)) for node in nodes[a:b]}
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    # A graph input is at hand in the first stage alone; an attribute lies in each stage that reads it.
    stage_of.update(dict.fromkeys(placeholders, 0))
    last = len(edges) - 2
    stage_of[result] = last

    def last_reader(node: fx.Node) -> int:
        return max((last_reader(user) if user in light else stage_of[user] for user in node.users), default=0)

    stages: list[fx.GraphModule] = []
    arriving: list[fx.Node] = placeholders
    for stage in range(last + 1):
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {node: graph.placeholder(node.name) for node in arriving}
        if stage > 0 and alone:
            copies = {node: graph.call_function(contiguous, (given,)) for node, given in copies.items()}

        def copy(node: fx.Node, graph: fx.Graph = graph, copies: dict[fx.Node, fx.Node] = copies) -> fx.Node:
            if node not in copies:
                copies[node] = graph.node_copy(node, copy)
            return copies[node]

        for node in nodes[edges[stage] : edges[stage + 1]]:
            copies[node] = graph.node_copy(node, copy)
        if stage == last:
            graph.output(fx.map_arg(result.args[0], copy))
        else:
            held = [*arriving, *nodes[edges[stage] : edges[stage + 1]]]
            arriving = [node for node in held if last_reader(node) > stage]
            leaving = tuple(copies[node] for node in arriving)
            if alone:
                leaving = tuple(graph.call_function(contiguous, (value,)) for value in leaving)
            graph.output(leaving[0] if len(leaving) == 1 else leaving)
        stages.append(fx.GraphModule(module, graph))
    if not alone:
        return stages
    owners: dict[int, int] = {}
    for stage, part in enumerate(stages):
        for name, parameter in part.named_parameters():
            if isinstance(parameter, torch.nn.Parameter) and owners.setdefault(id(parameter), stage) != stage:
                raise TrainingError(
                    f"stages {owners[id(parameter)]} and {stage} of the pipeline both read parameter {name!r}; use "
                    "fewer stages, or another way"
                )
    keep_state(module, stages)
    return stages


def keep_state(module: fx.GraphModule, parts: Sequence[fx.GraphModule]) -> None:
    """Let parts of a graph have the graph's `state_dict` together, also what no node reads, and not its constants."""
    from archipel.training.cloud.graphs.paths import has, install
    from archipel.training.cloud.graphs.tracing import forget_constants

    for part in parts:
        forget_constants(part)
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not any(has(part, name) for part in parts):
            # A second name of a parameter goes to its first one.
            owner = next((part for part in parts if any(tensor is each for each in part.parameters())), parts[-1])
            install(owner, name, tensor)
