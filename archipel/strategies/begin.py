"""The `begin` program of strategies whose steps add a correction to the gradient: it makes the corrections."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from archipel.bundle import Program
from archipel.strategies.device import CORRECTION, LocalTraining, MakeProgram
from archipel.strategies.program import ProgramGraph, round_state

if TYPE_CHECKING:
    import onnx


def corrections(strategy: str, add: Callable[[ProgramGraph, LocalTraining, str, str], str]) -> MakeProgram:
    """`begin` that makes the round state CORRECTION/PARAMETER of every parameter (see `device.Correction`).

    `add` adds the nodes that compute it, given the parameter's name and the name of the result, which it returns.
    """

    def make(local: LocalTraining) -> tuple[onnx.ModelProto, Program]:
        graph = ProgramGraph("begin", strategy)
        for name, array in local.parameters.items():
            graph.output(round_state(add(graph, local, name, f"{CORRECTION}/{name}"), array.shape))
        return graph.build()

    return make
