"""Which values are alive together while a graph runs, in the order in which ONNX Runtime runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from archipel.graph.walk import bodies, dependencies

_VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"})


def source(value: ir.Value) -> ir.Value:
    """The value whose memory this one is a view of: what a Reshape reads, for example; else itself."""
    while (node := value.producer()) is not None and node.domain == "" and node.op_type in _VIEWS:
        before = node.inputs[0]
        if before is None:
            break
        value = before
    return value


def execution_order(graph: ir.Graph) -> list[ir.Node]:
    """The nodes as ONNX Runtime orders them: depth first from the nodes that nobody reads, the last of them first.

    A node runs only when something needs it, and of its inputs the one that is last in the graph is computed first.
    """
    place = {node: index for index, node in enumerate(graph)}
    makers = {
        node: sorted(
            {maker for value in dependencies(node) if (maker := value.producer()) in place}, key=place.__getitem__
        )
        for node in place
    }
    read = {maker for before in makers.values() for maker in before}
    order: list[ir.Node] = []
    entered: set[ir.Node] = set()
    waiting = [(node, False) for node in place if node not in read]
    while waiting:
        node, done = waiting.pop()
        if done:
            order.append(node)
        elif node not in entered:
            entered.add(node)
            waiting.append((node, True))
            waiting.extend((maker, False) for maker in makers[node])
    return order


def finish_early(graph: ir.Graph, results: Iterable[ir.Value]) -> None:
    """Put the nodes that make these results at the end, the first one last.

    Results of the way back are made in the order in which their memory can go: that of the last layer first. ONNX
    Runtime begins with the last node that nobody reads, and so with the result that comes first; otherwise it would
    walk to the first layer at once, and keep for all others what they are made of.
    """
    place = {node: index for index, node in enumerate(graph)}
    makers = {maker for value in results if (maker := value.producer()) is not None and not value.uses()}
    for node in sorted((node for node in makers if node in place), key=place.__getitem__, reverse=True):
        if not any(value.uses() for value in node.outputs):
            graph.remove(node)
            graph.append(node)


@dataclass(frozen=True)
class Step:
    """A node as it runs: the values that are alive then with their bytes, and all bytes, those in its bodies included.

    `alive` changes with the next step.
    """

    node: ir.Node
    bytes: int
    alive: Mapping[ir.Value, int]


def live_steps(
    order: Sequence[ir.Node],
    nbytes: Callable[[ir.Value], int],
    kept: Iterable[ir.Value] = (),
    inner: bool = True,
    lasting: Iterable[ir.Value] = (),
) -> Iterator[Step]:
    """What is alive while each of the nodes runs, if they run in this order.

    Arguments:
        order: nodes, each after those whose results it reads.
        nbytes: the bytes of a value.
        kept: values that do not count: outputs, which belong to the caller.
        inner: count what bodies need, too.
        lasting: values that stay until the end, once they are made.
    """
    last_use: dict[ir.Value, ir.Node] = {}
    for node in order:  # a view keeps its source alive
        last_use.update((source(value), node) for value in dependencies(node))
    free, stays = {source(value) for value in kept}, {source(value) for value in lasting}
    alive: dict[ir.Value, int] = {}
    now = 0
    ending: dict[ir.Node, list[ir.Value]] = {}
    for value, node in last_use.items():
        if value not in stays:
            ending.setdefault(node, []).append(value)
    for node in order:
        results = [v for v in node.outputs if v.name and source(v) is v and v not in free]
        for value in results:
            alive[value] = nbytes(value)
            now += alive[value]
        inside = max((peak_bytes(list(body), nbytes, body.outputs) for body in bodies(node)), default=0) if inner else 0
        yield Step(node, now + inside, alive)
        for value in [*ending.get(node, []), *(v for v in results if v not in last_use and v not in stays)]:
            now -= alive.pop(value, 0)


def peak_bytes(
    order: Sequence[ir.Node], nbytes: Callable[[ir.Value], int], kept: Iterable[ir.Value] = (), inner: bool = True
) -> int:
    """The most bytes of results of the nodes that are alive at once; see `live_steps`."""
    return max((step.bytes for step in live_steps(order, nbytes, kept, inner)), default=0)
