"""Which parts of a model the way back computes again: the choice by memory and work.

The nodes, in the graph's order, are cut into runs, each either kept or computed again. Computing a run again keeps only
what later runs read of it, and costs its work once more; while the way back passes through the run, everything inside
is alive. A dynamic program over the places of the cuts finds the least work within a bound of memory (as Kusumoto et
al., A Graph Theoretic Framework of Recomputation Algorithms for Memory-Efficient Backpropagation, 2019, over a chain of
places; Chen et al. 2016 is the case of runs of one size).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from archipel.autodiff.activity import reads_content
from archipel.autodiff.reverse import differentiate
from archipel.graph.build import Builder
from archipel.graph.functions import inline_functions
from archipel.graph.liveness import execution_order, finish_early, peak_bytes, source
from archipel.graph.passes import optimize
from archipel.graph.shapes import dtype_of
from archipel.graph.sizes import Sizes
from archipel.graph.walk import dependencies

PLACES = 48
"""Cuts are looked for at so many places of the graph."""

_FLOPS_PER_BYTE = 4  # what a processor computes while it moves a byte, roughly: the work of elementwise operators
_WIDEST = 40  # choices that are followed at each place


@dataclass(frozen=True)
class Run:
    """Nodes from `start` to before `stop`, by their places in the graph."""

    start: int
    stop: int


_Way = tuple[float, float, tuple[Run, ...]]
"""Bytes kept, work, runs to compute again."""


def gradient_peak(model: ir.Model, targets: Sequence[str], wrt: Sequence[str], batch: int) -> int:
    """Bytes of intermediate values that are alive at once in the gradient of `targets`, with batches of that size.

    Weights, inputs and outputs are not counted."""
    trial, _ = _with_marker(model, targets, wrt)
    optimize(trial)  # which frees values earlier, and needs some no longer
    finish_early(trial.graph, trial.graph.outputs)
    sizes = Sizes(trial, batch)
    return peak_bytes(execution_order(trial.graph), sizes.nbytes, trial.graph.outputs)


class Costs:
    """Memory and work of a model's nodes, from its gradient as it is without recomputation.

    Arguments:
        model: the model, which is not changed.
        targets, wrt: names of what is differentiated, and with respect to what.
        again: whether a node may be computed again, by its name.
        batch: the size of symbolic dimensions, and the iterations of a loop that only its condition ends.
        flops: FLOPs by the nodes' names.
    """

    def __init__(
        self,
        model: ir.Model,
        targets: Sequence[str],
        wrt: Sequence[str],
        again: Callable[[ir.Node], bool],
        batch: int,
        flops: dict[str, int],
    ) -> None:
        nodes = list(model.graph)
        trial, marker = _with_marker(model, targets, wrt)
        sizes = Sizes(trial, batch, endless=batch)  # what is estimated here only serves to choose
        order = list(trial.graph)
        end = order.index(marker)
        names = {str(node.name): index for index, node in enumerate(nodes)}
        owner = _owners(order[:end], names)
        self._size = len(nodes)
        self._collect(order[:end], order[end + 1 :], owner, sizes, again, nodes)
        self._transient = _transients(order[end + 1 :], names, sizes, len(nodes), trial.graph.outputs)
        self._work = np.array([self._work_of(node, flops, sizes, again(node)) for node in nodes], float)
        self.cuts = self._places()
        self._tables()

    def _collect(
        self,
        forward: Sequence[ir.Node],
        backward: Sequence[ir.Node],
        owner: dict[ir.Node, int],
        sizes: Sizes,
        again: Callable[[ir.Node], bool],
        nodes: Sequence[ir.Node],
    ) -> None:
        """For each value of the way forward: where it is made, where it is last read, its bytes, and whether the way
        back reads it."""
        made: dict[ir.Value, int] = {}
        last: dict[ir.Value, int] = {}
        for node in forward:
            for value in dependencies(node) if reads_content(node) else ():
                last[source(value)] = max(last.get(source(value), 0), owner[node])
            for value in node.outputs:
                if source(value) is value and again(nodes[owner[node]]):
                    made[value] = owner[node]
                if value.is_graph_output():
                    last[source(value)] = len(nodes)
        needed = {source(value) for node in backward for value in dependencies(node)}
        values = [value for value in made if value.name and value.dtype is not None]
        self._made = np.array([made[v] for v in values], int)
        self._last = np.array([last.get(v, 0) for v in values], int)
        self._bytes = np.array([sizes.nbytes(v) for v in values], float)
        self._needed = np.array([v in needed for v in values], bool)

    def _work_of(self, node: ir.Node, flops: dict[str, int], sizes: Sizes, again: bool) -> float:
        if not again:
            return 0.0
        moved = sum(sizes.nbytes(v) for v in (*node.inputs, *node.outputs) if v is not None and v.name and v.dtype)
        return flops.get(str(node.name), 0) + _FLOPS_PER_BYTE * moved

    def _places(self) -> list[int]:
        """Where cuts may be: of each part of the graph, with equal bytes for the way back, the narrowest place."""
        width = np.zeros(self._size + 1)
        for made, last, nbytes in zip(self._made, self._last, self._bytes):
            width[made + 1 : last + 1] += nbytes
        weight = np.zeros(self._size)
        np.add.at(weight, self._made[self._needed], self._bytes[self._needed])
        so_far = np.cumsum(weight + weight.sum() / (16 * self._size) + 1e-9)
        part = np.minimum((so_far / so_far[-1] * PLACES).astype(int), PLACES - 1)
        cuts = {0, self._size}
        for number in range(PLACES):
            inside = np.flatnonzero(part == number) + 1  # a cut behind each node
            if len(inside):
                cuts.add(int(inside[np.argmin(width[inside])]))
        return sorted(cuts)

    def _tables(self) -> None:
        """By first and last cut: bytes that cross to later runs, bytes alive inside, temporary bytes, work."""
        count = len(self.cuts)
        self.crossing, self.inside, self.kept = (np.zeros((count, count)) for _ in range(3))
        self.temporary, self.work = np.zeros((count, count)), np.zeros((count, count))
        for b in range(1, count):
            crosses = self._last >= self.cuts[b]
            for a in range(b):
                here = (self._made >= self.cuts[a]) & (self._made < self.cuts[b])
                nbytes = self._bytes[here]
                over, needed = crosses[here], self._needed[here]
                self.crossing[a, b] = nbytes[over].sum()
                self.inside[a, b] = nbytes[needed & ~over].sum()
                self.kept[a, b] = nbytes[needed | over].sum()
                self.temporary[a, b] = self._transient[self.cuts[a] : self.cuts[b]].max()
                self.work[a, b] = self._work[self.cuts[a] : self.cuts[b]].sum()

    @property
    def everything(self) -> float:
        """The bytes that the way back needs if it computes nothing again."""
        return float(self.kept[0, -1] + self.temporary[0, -1])

    def smallest(self) -> float:
        """About the smallest budget that `plan` reaches."""
        low, high = 0.0, self.everything
        # A way keeps what crosses a cut until the end, so the whole is not always enough for a small graph.
        while not self._reaches(high):
            low, high = high, 2 * high + 1
        while high - low > 0.01 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self._reaches(middle) else (middle, high)
        return high

    def _reaches(self, budget: float) -> bool:
        # Of all ways to a cut the one that keeps least is the best for what follows.
        least = [0.0] + [np.inf] * (len(self.cuts) - 1)
        for a in range(len(self.cuts) - 1):
            for b, kept, alive, _, _ in self._steps(a, least[a]):
                if alive <= budget:
                    least[b] = min(least[b], kept)
        return bool(np.isfinite(least[-1]))

    def _steps(self, a: int, kept: float) -> list[tuple[int, float, float, float, bool]]:
        """Runs from cut `a`: (their end, bytes kept then, bytes alive on the way back, work, whether again)."""
        if not np.isfinite(kept):
            return []
        after = kept + self.kept[a, a + 1]
        steps = [(a + 1, after, after + self.temporary[a, a + 1], 0.0, False)]
        for b in range(a + 1, len(self.cuts) - 1):
            after = kept + self.crossing[a, b]
            alive = after + self.inside[a, b] + self.temporary[a, b]
            steps.append((b, after, alive, float(self.work[a, b]), True))
        return steps

    def plan(self, budget: float) -> list[Run]:
        """The runs to compute again for the least work within the budget of bytes, which is at least `smallest()`."""
        ways: list[list[_Way]] = [[(0.0, 0.0, ())], *([] for _ in self.cuts[1:])]
        for a in range(len(self.cuts) - 1):
            for kept, work, runs in _best(ways[a]):
                for b, after, alive, more, again in self._steps(a, kept):
                    if alive <= budget:
                        run = (Run(self.cuts[a], self.cuts[b]),) if again else ()
                        ways[b].append((after, work + more, runs + run))
        return list(min(ways[-1], key=lambda way: way[1])[2])


def _best(ways: list[_Way]) -> list[_Way]:
    """Those that no other one beats in both bytes and work; of many, some of all sizes."""
    kept: list[_Way] = []
    for way in sorted(ways, key=lambda way: way[:2]):
        if not kept or way[1] < kept[-1][1]:
            kept.append(way)
    if len(kept) <= _WIDEST:
        return kept
    return [kept[round(i * (len(kept) - 1) / (_WIDEST - 1))] for i in range(_WIDEST)]


def _with_marker(model: ir.Model, targets: Sequence[str], wrt: Sequence[str]) -> tuple[ir.Model, ir.Node]:
    """A copy with the gradient behind a node that stands between the way forward and the way back."""
    trial = model.clone()
    op = Builder(trial.graph)
    named = {
        value.name: value
        for value in (
            *trial.graph.inputs, *trial.graph.initializers.values(), *(v for node in trial.graph for v in node.outputs)
        )
    }  # fmt: skip
    seeds = {}
    for name in targets:
        target = named[name]
        shape = [f"{name}_{i}" if not isinstance(d, int | str) else d for i, d in enumerate(target.shape or ())]
        seeds[target] = op.input(op.unique(f"{name}.cotangent"), dtype_of(target), shape)
    marker_value = op.Identity(next(iter(seeds)))
    marker = marker_value.producer()
    assert marker is not None
    for gradient in differentiate(op, seeds, [named[name] for name in wrt]):
        trial.graph.outputs.append(gradient if gradient.producer() is not None else op.Identity(gradient))
    inline_functions(trial)
    return trial, marker


def _owners(forward: Sequence[ir.Node], names: dict[str, int]) -> dict[ir.Node, int]:
    """For each node of the way forward the place of the model's node that it stands for: its own, or that of the node
    that a rule has put it behind."""
    owner: dict[ir.Node, int] = {}
    current = 0
    for node in forward:
        current = owner[node] = names.get(str(node.name), current)
    return owner


def _transients(
    backward: Sequence[ir.Node], names: dict[str, int], sizes: Sizes, count: int, outputs: Sequence[ir.Value]
) -> np.ndarray:
    """For each node the most bytes of the way back's own values that are alive while its gradient is computed."""
    last: dict[ir.Value, ir.Node] = {}
    for node in backward:
        last.update((source(value), node) for value in dependencies(node))
    ending: dict[ir.Node, list[ir.Value]] = {}
    for value, node in last.items():
        ending.setdefault(node, []).append(value)
    result = np.zeros(count)
    alive: dict[ir.Value, int] = {}
    now, owner = 0, count - 1
    free = {source(value) for value in outputs}
    for node in backward:
        owner = names.get(str(node.name).rsplit(".vjp/", 1)[0], owner)
        for value in node.outputs:
            if value.name and source(value) is value and value in last and value not in free:
                alive[value] = sizes.nbytes(value)
                now += alive[value]
        result[owner] = max(result[owner], now)
        for value in ending.get(node, ()):
            now -= alive.pop(value, 0)
    return result
