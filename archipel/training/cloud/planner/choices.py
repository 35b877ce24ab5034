"""Choose one option at each node of a graph so that nodes and edges together cost least: an ILP, and a check of it.

The formulation is that of Alpa (Zheng et al. 2022, section 4.2): a variable for each option, and one for each pair of
options of an edge, whose sums are the options' variables. HiGHS solves it (scipy.optimize.milp).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from archipel.errors import MissingExtraError

_SECONDS = 20.0  # after which the best choice so far is taken
_GAP = 1e-3  # a choice counts as cheapest if no other can be cheaper by this share


@dataclass
class Problem:
    """Costs of options.

    Attributes:
        costs: for each node the cost of each of its options, 0 or more.
        edges: (node, node, matrix of costs [options of the first, options of the second]); infinity forbids a pair.
        weights: for each node the weight (memory) of each option.
        limit: the most weight of all chosen options; infinity: any.
    """

    costs: list[Sequence[float]] = field(default_factory=list)
    edges: list[tuple[int, int, NDArray[np.float64]]] = field(default_factory=list)
    weights: list[Sequence[float]] = field(default_factory=list)
    limit: float = math.inf

    def total(self, chosen: Sequence[int]) -> float:
        """The cost of a choice: of its options and edges; infinity if it is not allowed."""
        if self.weight(chosen) > self.limit:
            return math.inf
        nodes = sum(cost[option] for cost, option in zip(self.costs, chosen))
        return nodes + sum(float(matrix[chosen[a], chosen[b]]) for a, b, matrix in self.edges)

    def weight(self, chosen: Sequence[int]) -> float:
        return sum(weight[option] for weight, option in zip(self.weights, chosen))


def choose(problem: Problem) -> list[int] | None:
    """The cheapest choice: an option for each node. None if no choice is allowed."""
    if math.isinf(problem.limit) and _is_chain(problem):
        return choose_along_chain(problem)
    return choose_by_ilp(problem)


def choose_by_ilp(problem: Problem, gap: float = _GAP) -> list[int] | None:
    """As `choose`, for any graph, with a limit or without. Needs SciPy.

    The choice costs at most the share `gap` more than the cheapest, unless the search takes too long.
    """
    try:
        from scipy import optimize, sparse
    except ImportError as error:
        raise MissingExtraError("scipy", "cloud") from error

    first, count = [], 0
    for cost in problem.costs:
        first.append(count)
        count += len(cost)
    objective = [float(c) for cost in problem.costs for c in cost]
    # HiGHS compares with absolute tolerances, and a step may take microseconds.
    finite = [c for c in objective if c > 0] + [
        float(c) for _, _, matrix in problem.edges for c in matrix.reshape(-1) if 0 < c < math.inf
    ]
    scale = 1000.0 / max(sum(finite), 1e-30)
    upper = [1.0] * count
    rows, columns, values = list[int](), list[int](), list[float]()
    low, high = list[float](), list[float]()

    def constrain(entries: list[tuple[int, float]], at_least: float, at_most: float) -> None:
        for column, value in entries:
            rows.append(len(low))
            columns.append(column)
            values.append(value)
        low.append(at_least)
        high.append(at_most)

    for start, cost in zip(first, problem.costs):
        constrain([(start + option, 1.0) for option in range(len(cost))], 1.0, 1.0)
    for a, b, matrix in problem.edges:
        pair = len(objective)
        objective += [float(c) if c < math.inf else 0.0 for c in matrix.reshape(-1)]
        upper += [1.0 if c < math.inf else 0.0 for c in matrix.reshape(-1)]
        for i in range(matrix.shape[0]):
            row = [(pair + i * matrix.shape[1] + j, 1.0) for j in range(matrix.shape[1])]
            constrain([*row, (first[a] + i, -1.0)], 0.0, 0.0)
        for j in range(matrix.shape[1]):
            column = [(pair + i * matrix.shape[1] + j, 1.0) for i in range(matrix.shape[0])]
            constrain([*column, (first[b] + j, -1.0)], 0.0, 0.0)
    if not math.isinf(problem.limit):
        largest = max((w for weight in problem.weights for w in weight), default=1.0) or 1.0
        entries = [
            (start + i, w / largest) for start, weight in zip(first, problem.weights) for i, w in enumerate(weight)
        ]
        constrain(entries, -np.inf, problem.limit / largest)
    size = len(objective)
    matrix_all = sparse.csr_array((values, (rows, columns)), shape=(len(low), size))
    result = optimize.milp(
        np.array(objective) * scale,
        constraints=optimize.LinearConstraint(matrix_all, low, high),
        # The pairs follow from the options, so these alone have to be whole.
        integrality=np.array([1] * count + [0] * (size - count)),
        bounds=optimize.Bounds(0.0, np.array(upper)),
        options={"time_limit": _SECONDS, "mip_rel_gap": gap},
    )
    if result.x is None:
        return None
    return [int(np.argmax(result.x[start : start + len(cost)])) for start, cost in zip(first, problem.costs)]


def choose_along_chain(problem: Problem) -> list[int] | None:
    """As `choose`, by dynamic programming: for edges from node i to node i + 1 alone, and no limit."""
    matrices = {(a, b): matrix for a, b, matrix in problem.edges}
    best = np.array(problem.costs[0], dtype=np.float64)
    came_from: list[NDArray[np.intp]] = []
    for node in range(1, len(problem.costs)):
        options = np.array(problem.costs[node], dtype=np.float64)
        through = best[:, None] + matrices.get((node - 1, node), np.zeros((len(best), len(options))))
        came_from.append(through.argmin(0))
        best = through.min(0) + options
    if not np.isfinite(best.min()):
        return None
    chosen = [int(best.argmin())]
    for origins in reversed(came_from):
        chosen.append(int(origins[chosen[-1]]))
    return chosen[::-1]


def _is_chain(problem: Problem) -> bool:
    pairs = [(a, b) for a, b, _ in problem.edges]
    return bool(problem.costs) and len(set(pairs)) == len(pairs) and all(b == a + 1 for a, b in pairs)
