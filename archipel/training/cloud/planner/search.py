"""The cheapest division of each operator of a graph over the devices of a mesh."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from archipel.training.cloud.planner import cluster as links
from archipel.training.cloud.planner.choices import Problem, choose
from archipel.training.cloud.planner.cluster import Cluster
from archipel.training.cloud.planner.compute import OPTIMIZERS, optimizer_seconds, unit_seconds
from archipel.training.cloud.planner.costs import Costs, Operand, Tensor, Unit
from archipel.training.cloud.planner.shardings import SUM, WHOLE, Layout, Strategy, strategies


@dataclass(frozen=True)
class Division:
    """What was chosen for one model group.

    Attributes:
        strategies: for each unit, by name.
        seconds: compute, exchanges within the group, and optimizer, of one step.
        memory_bytes: of one device.
        gradient_bytes: of the parameters that one device has: what groups exchange.
        tensors: the number of these parameters.
    """

    strategies: dict[str, Strategy]
    seconds: float
    memory_bytes: float
    gradient_bytes: float
    tensors: int


def search(
    costs: Costs, cluster: Cluster, n: int, optimizer: str, limit: float = math.inf, only: str = ""
) -> Division | None:
    """The fastest division over groups of `n` devices, each of which has all examples of `costs`.

    Arguments:
        limit: bytes of memory that each device has; what does not fit is not chosen.
        only: "tensor": nothing is divided along the examples, and products by columns or rows where they can be; "":
            any.

    Returns None if nothing fits.
    """
    states = 2 + OPTIMIZERS[optimizer][0]
    problem, options = Problem(limit=limit), list[list[Strategy]]()
    maker: dict[str, tuple[int, int]] = {}
    reader: dict[str, tuple[int, int]] = {}
    for place, unit in enumerate(costs.units):
        found = strategies(unit, n)
        if only == "tensor":
            found = _of_tensor_parallelism(unit, found)
        options.append(found)
        problem.costs.append([_seconds(unit, s, cluster, n, optimizer, reader) for s in found])
        problem.weights.append([_memory(unit, s, n, states, reader) for s in found])
        for index, read in enumerate(unit.reads):
            if isinstance(read, Operand):
                first = reader.setdefault(read.parameter.name, (place, index))
                if first[0] != place:  # a parameter that two units read lies in one way
                    problem.edges.append((first[0], place, _same(options[first[0]], first[1], found, index)))
            elif isinstance(read, Tensor) and read.name in maker:
                origin, result = maker[read.name]
                learns = costs.units[origin].backward > 0
                matrix = _moves(cluster, read.nbytes, n, options[origin], result, found, index, learns)
                problem.edges.append((origin, place, matrix))
        maker.update((written.name, (place, result)) for result, written in enumerate(unit.writes))
    for name in costs.outputs:
        if name in maker:  # whole on each device, where the loss is computed
            place, result = maker[name]
            nbytes = costs.units[place].writes[result].nbytes
            added = [_move(cluster, nbytes, n, s.writes[result], WHOLE) for s in options[place]]
            problem.costs[place] = [cost + more for cost, more in zip(problem.costs[place], added)]
    problem.edges = _joined(problem.edges)
    chosen = choose(problem)
    if chosen is None:
        return None
    picked = {unit.name: options[i][chosen[i]] for i, unit in enumerate(costs.units)}
    local = {}
    for unit in costs.units:
        for read, layout in zip(unit.reads, picked[unit.name].reads):
            if isinstance(read, Operand):
                local[read.parameter.name] = read.parameter.nbytes / (n if layout >= 0 else 1)
    return Division(picked, problem.total(chosen), problem.weight(chosen), sum(local.values()), len(local))


def _of_tensor_parallelism(unit: Unit, found: list[Strategy]) -> list[Strategy]:
    """The strategies that do not divide examples; where some divide a product's weight, these."""
    left = [s for s in found if not s.writes or s.writes[0] not in unit.writes[0].examples]
    return [s for s in left if s.name in ("column", "row")] or left


def _seconds(
    unit: Unit, strategy: Strategy, cluster: Cluster, n: int, optimizer: str, reader: dict[str, tuple[int, int]]
) -> float:
    total = unit_seconds(unit, cluster, strategy.share)
    for read, layout, gradient in zip(unit.reads, strategy.reads, strategy.gradients):
        if isinstance(read, Operand) and n > 1 and gradient == SUM:
            total += links.all_reduce_seconds(cluster, read.parameter.nbytes, n)
            total += links.prepare_seconds(cluster, read.parameter.nbytes) + cluster.wait_seconds
        if isinstance(read, Operand) and read.parameter.name not in reader:
            local = read.parameter.nbytes / (n if layout >= 0 else 1)
            total += optimizer_seconds(local, 1, cluster, optimizer) + cluster.fresh_seconds(local)
    return total


def _memory(unit: Unit, strategy: Strategy, n: int, states: int, reader: dict[str, tuple[int, int]]) -> float:
    total = unit.saved / (n if strategy.writes and strategy.writes[0] >= 0 else 1)
    for read, layout in zip(unit.reads, strategy.reads):
        if isinstance(read, Operand) and read.parameter.name not in reader:
            total += read.parameter.nbytes * states / (n if layout >= 0 else 1)
    return total


def _moves(
    cluster: Cluster,
    nbytes: int,
    n: int,
    makers: list[Strategy],
    result: int,
    readers: list[Strategy],
    index: int,
    learns: bool,
) -> np.ndarray:
    """Seconds of an edge: the value forward, and its gradient back."""
    matrix = np.zeros((len(makers), len(readers)))
    for i, made in enumerate(makers):
        for j, used in enumerate(readers):
            before, after = made.writes[result], used.reads[index]
            matrix[i, j] = _move(cluster, nbytes, n, before, after)
            if learns:
                # A sum's summands each have the whole gradient.
                wanted = WHOLE if before == SUM else before
                matrix[i, j] += _move(cluster, nbytes, n, used.gradients[index], wanted)
    return matrix


def _move(cluster: Cluster, nbytes: float, n: int, before: Layout, after: Layout) -> float:
    if before == after or n == 1:
        return 0.0
    if before == WHOLE:
        return 0.0 if after >= 0 else math.inf  # each device takes its part of what it has
    if after == SUM:
        return math.inf
    if before == SUM:
        exchange = links.all_reduce_seconds if after == WHOLE else links.scatter_seconds
    else:
        exchange = links.gather_seconds if after == WHOLE else links.all_to_all_seconds
    return exchange(cluster, nbytes, n) + links.prepare_seconds(cluster, nbytes) + cluster.wait_seconds


def _same(first: list[Strategy], a: int, second: list[Strategy], b: int) -> np.ndarray:
    return np.array([[0.0 if s.reads[a] == t.reads[b] else math.inf for t in second] for s in first])


def _joined(edges: list[tuple[int, int, np.ndarray]]) -> list[tuple[int, int, np.ndarray]]:
    """One edge for each pair of nodes."""
    joined: dict[tuple[int, int], np.ndarray] = {}
    for a, b, matrix in edges:
        joined[a, b] = joined[a, b] + matrix if (a, b) in joined else matrix
    return [(a, b, matrix) for (a, b), matrix in joined.items()]
