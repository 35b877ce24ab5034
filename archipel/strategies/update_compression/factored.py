"""Low-rank updates on the device, as nodes of `finish`: two thin factors in place of each matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from archipel.bundle.carried import LEFT, RIGHT
from archipel.bundle.roles import Broadcast, LowRank, State, Update
from archipel.strategies.program import device_state
from archipel.strategies.update_compression.low_rank import SHARE
from archipel.strategies.update_compression.shortening import add_shrink

if TYPE_CHECKING:
    from archipel.strategies.device import LocalTraining, Upload, Weighting
    from archipel.strategies.program import ProgramGraph


def upload_factored(
    graph: ProgramGraph, local: LocalTraining, upload: Upload, changes: Sequence[str], weighting: Weighting
) -> str:
    """Add an output for each parameter: the factors of a matrix, or the change itself where these are no smaller.

    The device keeps what it does not send (`low_rank`), and what shortening to the clip left of it. Returns the factor
    of that shortening.
    """
    wanted, sent, made = {}, {}, {}
    shapes = {name: _shape_of_factors(array.shape, upload.compress_rank) for name, array in local.parameters.items()}
    for (name, array), change in zip(local.parameters.items(), changes, strict=True):
        kept = graph.input(_kept(graph, name, array.shape))
        sent[name] = made[name] = wanted[name] = graph.node("Add", [change, kept], f"{name}.wanted")
        if (factors := shapes[name]) is not None:
            sent[name], made[name] = _add_factors(graph, name, wanted[name], array.shape, factors[1])
    shrink = add_shrink(graph, list(sent.values()), weighting)
    for name, array in local.parameters.items():
        entry = graph.node("Mul", [sent[name], shrink], f"{name}.packed.update")
        factors = shapes[name]
        graph.output(
            Update(
                name=entry, tensor=name if factors is None else graph.own(f"packed/{name}"), dtype="float32",
                shape=array.shape if factors is None else factors, kind="delta", weighting=weighting,
                range=upload.range, bits=upload.bits, clip=upload.bound,
                carries=None if factors is None else LowRank(parameters=(name,)),
            )
        )  # fmt: skip
        gone = graph.node("Mul", [made[name], shrink], f"{name}.made_of_it")
        state = _kept(graph, name, array.shape)
        following = graph.node("Sub", [wanted[name], gone], f"{state.name}.next")
        graph.output(device_state(following, state.tensor, array.shape))
    return shrink


def _shape_of_factors(shape: tuple[int, ...], rank: int) -> tuple[int, int] | None:
    """`[rows + columns, rank]` of a parameter's matrix; None where the factors would be no smaller than it is."""
    if len(shape) < 2:
        return None
    rows, columns = shape[0], math.prod(shape[1:])
    factors = rows + columns, min(rank, rows, columns)
    return factors if math.prod(factors) < rows * columns else None


def _add_factors(graph: ProgramGraph, name: str, wanted: str, shape: tuple[int, ...], rank: int) -> tuple[str, str]:
    """Add the factors, `[rows + columns, rank]`, and what the server makes of them. Returns the names of both."""
    rows, columns = shape[0], math.prod(shape[1:])

    def basis(prefix: str, length: int) -> str:
        tensor = prefix + name
        return graph.input(Broadcast(name=tensor, tensor=tensor, dtype="float32", shape=(length, rank)))

    def node(kind: str, inputs: list[str], output: str, **attributes: object) -> str:
        return graph.node(kind, inputs, f"{name}.{output}", **attributes)

    def turned(value: str, output: str) -> str:
        return node("Transpose", [value], output, perm=[1, 0])

    left, right = basis(LEFT, rows), basis(RIGHT, columns)
    matrix = node("Reshape", [wanted, graph.array(f"{name}.matrix_shape", np.array([rows, columns]))], "matrix")
    of_left = node("MatMul", [matrix, right], "left_factor")
    of_right = node("MatMul", [turned(matrix, "turned"), left], "right_factor")
    both = node("Concat", [of_left, of_right], "factors", axis=0)
    sent = node("Mul", [both, graph.constant("packed/share", SHARE)], "factors_shortened")
    # As `low_rank.expand` does it.
    back = turned(right, "right_turned")
    inner = node("MatMul", [turned(left, "left_turned"), of_left], "inner")
    twice = node("MatMul", [inner, back], "counted_twice")
    rest = node("Sub", [turned(of_right, "right_factor_turned"), twice], "rest")
    whole = node(
        "Add", [node("MatMul", [of_left, back], "by_rows"), node("MatMul", [left, rest], "by_columns")], "made_matrix"
    )
    return sent, node("Reshape", [whole, graph.array(f"{name}.own_shape", np.array(shape))], "made")


def _kept(graph: ProgramGraph, name: str, shape: tuple[int, ...]) -> State:
    tensor = graph.own(f"packed/kept/{name}")
    return device_state(tensor, tensor, shape)
