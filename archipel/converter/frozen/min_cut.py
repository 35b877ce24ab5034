"""A minimum cut of a small directed graph, by augmenting paths (Edmonds and Karp 1972)."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from typing import TypeVar

N = TypeVar("N")


def source_side(edges: Iterable[tuple[N, N, int]], source: N, sink: N) -> set[N]:
    """The nodes on the source's side of a minimum cut: of all minimum cuts the one closest to the source.

    `edges` are (from, to, capacity), with capacities of 0 and above; parallel edges add up.
    """
    # The residual graph: the capacity that is left of each edge, and backwards the flow that can be taken back.
    left: dict[N, dict[N, int]] = defaultdict(lambda: defaultdict(int))
    for start, end, capacity in edges:
        left[start][end] += capacity
        left[end][start] += 0
    while True:
        came_from = _search(left, source, sink)
        if sink not in came_from:
            # The flow is a maximum one, and what the source still reaches is its side of a minimum cut.
            return set(came_from)
        path, node = [], sink
        while node != source:
            path.append((came_from[node], node))
            node = came_from[node]
        flow = min(left[a][b] for a, b in path)
        for a, b in path:
            left[a][b] -= flow
            left[b][a] += flow


def _search(left: dict[N, dict[N, int]], source: N, sink: N) -> dict[N, N]:
    """For each node within reach the node before it on a shortest path. Ends at the sink.

    Breadth first: with shortest paths the number of rounds has a bound that does not depend on the capacities.
    """
    came_from = {source: source}
    queue = deque([source])
    while queue:
        node = queue.popleft()
        for following, capacity in left[node].items():
            if capacity > 0 and following not in came_from:
                came_from[following] = node
                if following == sink:
                    return came_from
                queue.append(following)
    return came_from
