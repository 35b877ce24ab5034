"""A loop as the gradient sees it, Scan or Loop, and the parts of the loop that computes its gradient."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir

from archipel.graph.build import Builder
from archipel.graph.control import Carried, Item, Stacked
from archipel.graph.shapes import Dim


@dataclass(frozen=True)
class State:
    """A carried value: the body's input, its output, the index of the node's input, and the node's result."""

    inside: ir.Value
    following: ir.Value
    index: int
    result: ir.Value


@dataclass(frozen=True)
class Series:
    """A sequence: the body's input or output, and how the node reads or stacks it."""

    inside: ir.Value
    outside: ir.Value
    axis: int
    backwards: bool


@dataclass
class Form:
    """A loop.

    `items` are the sequences that it reads, the first of them the node's input number `first`; `stacked` those that it
    makes, of `length` items.
    """

    body: ir.Graph
    states: list[State]
    items: list[Series]
    first: int
    stacked: list[Series]
    length: Dim


@dataclass
class WayBack:
    """The loop of the gradient.

    `op` has its body, which began as a copy of the loop's; `copies` are the values of the loop's body there. The other
    fields are the arguments of `emit_scan`, and whose gradients its results are: indices among the node's inputs and
    captured values.
    """

    op: Builder
    copies: dict[ir.Value, ir.Value]
    carried: list[Carried] = field(default_factory=list)
    carried_of: list[int | None] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    stacked: list[Stacked] = field(default_factory=list)
    stacked_of: list[int] = field(default_factory=list)

    @property
    def results(self) -> list[ir.Value]:
        """What the body returns."""
        return [*(each.following for each in self.carried), *(each.inside for each in self.stacked)]

    @property
    def inputs(self) -> list[ir.Value]:
        """What the body is given, so far."""
        return [*(each.inside for each in self.carried), *(each.inside for each in self.items)]

    def carry(self, state: Carried, of: int | None = None) -> None:
        self.carried.append(state)
        self.carried_of.append(of)
