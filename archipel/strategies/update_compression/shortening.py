"""Shortens what is sent to the clip of the round, in the graph of `finish`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from archipel.strategies.device import Weighting
    from archipel.strategies.program import ProgramGraph


def add_shortened(graph: ProgramGraph, vector: str, weighting: Weighting) -> tuple[str, str]:
    """Add the vector times the factor of `add_shrink`. Returns the names of both."""
    shrink = add_shrink(graph, [vector], weighting)
    return graph.node("Mul", [vector, shrink], graph.own("packed/shortened")), shrink


def add_shrink(graph: ProgramGraph, parts: Sequence[str], weighting: Weighting) -> str:
    """Add the factor min(1, clip weight / norm of all parts together). Returns its name.

    `graph` has `clip`, `one` and `tiny` under its own names, and `weight` where changes are weighted.
    """

    def own(name: str) -> str:
        return graph.own(f"packed/{name}")

    limit = graph.own("clip")
    if weighting == "examples":
        limit = graph.node("Mul", [limit, graph.own("weight")], own("limit"))
    squares = [graph.node("ReduceSumSquare", [part], f"{part}.sent_square", keepdims=0) for part in parts]
    norm = graph.node("Sqrt", [graph.node("Sum", squares, own("squares"))], own("norm"))
    norm = graph.node("Max", [norm, graph.own("tiny")], own("norm_above_zero"))
    return graph.node("Min", [graph.node("Div", [limit, norm], own("ratio")), graph.own("one")], own("shrink"))
