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
    for (name, array), change in zip(local.parameters.items(), changes, strict=True):
        kept = graph.input(_kept(graph, name, array.shape))
        wanted[name] = graph.node("Add", [change, kept], f"{name}.wanted")
        rows, columns = array.shape[0] if array.ndim else 1, math.prod(array.shape[1:])
        small = min(upload.compress_rank, rows, columns)
        if array.ndim < 2 or small * (rows + columns) >= rows * columns:
            sent[name] = made[name] = wanted[name]
        else:
            sent[name], made[name] = _factors(graph, name, wanted[name], (rows, columns), small, array.shape)
    shrink = add_shrink(graph, list(sent.values()), weighting)
    for name, array in local.parameters.items():
        entry = graph.node("Mul", [sent[name], shrink], f"{name}.packed.update")
        factors = sent[name] != wanted[name]
        shape = tuple(array.shape)
        if factors:
            small = min(upload.compress_rank, shape[0], math.prod(shape[1:]))
            shape = (shape[0] + math.prod(shape[1:]), small)
        graph.output(
            Update(
                name=entry, tensor=graph.own(f"packed/{name}") if factors else name, dtype="float32", shape=shape,
                kind="delta", weighting=weighting, range=upload.range, bits=upload.bits, clip=upload.bound,
                carries=LowRank(parameters=(name,)) if factors else None,
            )
        )  # fmt: skip
        gone = graph.node("Mul", [made[name], shrink], f"{name}.made_of_it")
        following = graph.node("Sub", [wanted[name], gone], f"{_kept(graph, name, array.shape).name}.next")
        graph.output(device_state(following, _kept(graph, name, array.shape).tensor, array.shape))
    return shrink


def _factors(
    graph: ProgramGraph, name: str, wanted: str, size: tuple[int, int], rank: int, shape: tuple[int, ...]
) -> tuple[str, str]:
    """Add the factors, `[rows + columns, rank]`, and what the server makes of them. Returns the names of both."""
    rows, columns = size

    def basis(prefix: str, length: int) -> str:
        return graph.input(
            Broadcast(name=f"{prefix}{name}", tensor=f"{prefix}{name}", dtype="float32", shape=(length, rank))
        )

    def node(kind: str, inputs: list[str], output: str, **attributes: object) -> str:
        return graph.node(kind, inputs, f"{name}.{output}", **attributes)

    left, right = basis(LEFT, rows), basis(RIGHT, columns)
    matrix = node("Reshape", [wanted, graph.array(f"{name}.matrix_shape", np.array(size))], "matrix")
    of_left = node("MatMul", [matrix, right], "left_factor")
    turned = node("Transpose", [matrix], "turned", perm=[1, 0])
    of_right = node("MatMul", [turned, left], "right_factor")
    both = node("Concat", [of_left, of_right], "factors", axis=0)
    sent = node("Mul", [both, graph.constant("packed/share", SHARE)], "factors_shortened")
    # As `low_rank.expand` does it.
    back, basis_back = (
        node("Transpose", [right], "right_turned", perm=[1, 0]),
        node("Transpose", [left], "left_turned", perm=[1, 0]),
    )
    first = node("MatMul", [of_left, back], "by_rows")
    inner = node("MatMul", [node("MatMul", [basis_back, of_left], "inner"), back], "counted_twice")
    rest = node("Sub", [node("Transpose", [of_right], "right_factor_turned", perm=[1, 0]), inner], "rest")
    whole = node("Add", [first, node("MatMul", [left, rest], "by_columns")], "made_matrix")
    return sent, node("Reshape", [whole, graph.array(f"{name}.own_shape", np.array(shape))], "made")


def _kept(graph: ProgramGraph, name: str, shape: tuple[int, ...]) -> State:
    tensor = graph.own(f"packed/kept/{name}")
    return device_state(tensor, tensor, shape)
