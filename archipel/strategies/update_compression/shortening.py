"""Shortens a vector to the clip of the round, in the graph of `finish`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from archipel.strategies.device import Weighting
    from archipel.strategies.program import ProgramGraph


def add_shortened(graph: ProgramGraph, vector: str, weighting: Weighting) -> tuple[str, str]:
    """Add the vector times the factor min(1, clip weight / norm). Returns the names of both.

    `graph` has `clip` and `tiny` under its own names, and `weight` where changes are weighted.
    """

    def own(name: str) -> str:
        return graph.own(f"packed/{name}")

    limit = graph.own("clip")
    if weighting == "examples":
        limit = graph.node("Mul", [limit, graph.own("weight")], own("limit"))
    squares = graph.node("ReduceSumSquare", [vector], own("squares"), keepdims=0)
    norm = graph.node("Max", [graph.node("Sqrt", [squares], own("norm")), graph.own("tiny")], own("norm_above_zero"))
    shrink = graph.node("Min", [graph.node("Div", [limit, norm], own("ratio")), graph.own("one")], own("shrink"))
    return graph.node("Mul", [vector, shrink], own("shortened")), shrink
