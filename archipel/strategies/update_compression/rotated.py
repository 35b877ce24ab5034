"""The device's side of rotated updates, as nodes of `finish`: rotate, and round to steps by chance.

Stochastic rounding takes the step above with the probability of the part above the step below, so its mean is the
number itself: the errors of many devices cancel, where rounding to the nearest step would turn all small numbers to 0.
The random numbers come from the round's `seed`, which follows from a secret of the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from archipel.bundle.carried import MOST_SEED, UPDATE_SEED
from archipel.bundle.roles import Hyperparameter, Rotation, Seed, Update
from archipel.strategies.update_compression.hashing import ROUNDING, SIGNS, add_bits
from archipel.strategies.update_compression.rotation import SPREAD, choose_block

if TYPE_CHECKING:
    from archipel.strategies.device import LocalTraining, Upload, Weighting
    from archipel.strategies.program import ProgramGraph

_FLOAT, _UINT32 = 1, 12


def upload_rotated(
    graph: ProgramGraph, local: LocalTraining, upload: Upload, changes: Sequence[str], weighting: Weighting
) -> None:
    """Add one output with all changes, rotated together.

    Arguments:
        graph: of `finish`, with the round's clip under its own name `clip`.
        local: whose parameters changed.
        upload: how.
        changes: the names of the clipped and weighted changes, in the order of the parameters.
        weighting: of the changes.
    """
    sizes = [array.size for array in local.parameters.values()]
    block = choose_block(sum(sizes))
    blocks = -(-sum(sizes) // block)
    rows = _add_rows(graph, changes, sum(sizes), (blocks, block))
    rotated = add_transform(graph, _add_signs(graph, rows, (blocks, block)), (blocks, block), "rotated")
    # The range follows the clip, as in protocol.uploads.plan_layout.
    share = min(1.0, SPREAD / math.sqrt(blocks * block))
    span = upload.bound * share if upload.value_range is None else upload.range
    most = (1 << (upload.bits - 1)) - 1
    step = graph.node(
        "Mul",
        [graph.own("clip"), graph.constant("packed/step_share", span / upload.bound / most)],
        graph.own("packed/step"),
    )
    rounded = _add_rounding(graph, rotated, step, most, (blocks, block))
    graph.output(
        Update(
            name=graph.node("Mul", [rounded, step], graph.own("rotated.update")), tensor=graph.own("packed/rotated"),
            dtype="float32", shape=(blocks, block), kind="delta", weighting=weighting, range=span, bits=upload.bits,
            clip=upload.bound, carries=Rotation(parameters=tuple(local.parameters), block=block),
        )
    )  # fmt: skip


def add_transform(graph: ProgramGraph, rows: str, shape: tuple[int, int], prefix: str) -> str:
    """Add the Walsh-Hadamard transform of each row of `[blocks, block]`, divided by the root of the block.

    The transform of 2^(a + b) elements is that of 2^a, and that of 2^b, along the two axes of a matrix: two products of
    matrices, which every runtime has.
    """
    blocks, block = shape
    power = block.bit_length() - 1
    left, right = 1 << (power // 2), 1 << (power - power // 2)

    def own(name: str) -> str:
        return graph.own(f"packed/{prefix}/{name}")

    split = graph.node("Reshape", [rows, graph.array(own("split"), np.array([blocks, left, right]))], own("matrices"))
    along = graph.node("MatMul", [split, _add_hadamard(graph, right)], own("along"))
    both = graph.node("MatMul", [_add_hadamard(graph, left), along], own("both"))
    return graph.node("Reshape", [both, graph.array(own("join"), np.array([blocks, block]))], own("rows"))


def _add_hadamard(graph: ProgramGraph, size: int) -> str:
    """Sylvester's matrix, divided by the root of its size."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return graph.array(graph.own(f"packed/hadamard_{size}"), (matrix / np.sqrt(size)).astype(np.float32))


def _add_rows(graph: ProgramGraph, changes: Sequence[str], size: int, shape: tuple[int, int]) -> str:
    blocks, block = shape
    flat = [
        graph.node("Reshape", [change, graph.array(graph.own("packed/flat"), np.array([-1]))], f"{change}.flat")
        for change in changes
    ]
    padding = blocks * block - size
    if padding:
        flat.append(graph.array(graph.own("packed/padding"), np.zeros(padding, np.float32)))
    joined = graph.node("Concat", flat, graph.own("packed/joined"), axis=0)
    columns = graph.array(graph.own("packed/columns"), np.array([block, blocks]))
    return graph.node(
        "Transpose",
        [graph.node("Reshape", [joined, columns], graph.own("packed/dealt"))],
        graph.own("packed/dealt_rows"),
        perm=[1, 0],
    )


def _add_signs(graph: ProgramGraph, rows: str, shape: tuple[int, int]) -> str:
    port = Hyperparameter(name=UPDATE_SEED, dtype="float32", shape=(), default=0.0, minimum=0.0, maximum=MOST_SEED)
    seed = graph.node("Cast", [graph.input(port)], graph.own("packed/public_seed"), to=_UINT32)
    bits = add_bits(graph, seed, SIGNS, shape[0] * shape[1], "signs")
    top = graph.node(
        "BitShift",
        [bits, graph.array(graph.own("packed/shift_31"), np.uint32(31))],
        graph.own("packed/sign_bits"),
        direction="RIGHT",
    )
    twice = graph.node(
        "Mul",
        [graph.node("Cast", [top], graph.own("packed/negative"), to=_FLOAT), graph.constant("packed/two", 2.0)],
        graph.own("packed/negative_twice"),
    )
    signs = graph.node("Sub", [graph.constant("packed/unit", 1.0), twice], graph.own("packed/flat_signs"))
    by_row = graph.node(
        "Reshape", [signs, graph.array(graph.own("packed/sign_shape"), np.array(shape))], graph.own("packed/signs")
    )
    return graph.node("Mul", [rows, by_row], graph.own("packed/signed"))


def _add_rounding(graph: ProgramGraph, rows: str, step: str, most: int, shape: tuple[int, int]) -> str:
    """Add whole numbers of steps, from -most to most."""
    steps = graph.node("Div", [rows, step], graph.own("packed/steps"))
    limits = [graph.constant("packed/least_steps", -float(most)), graph.constant("packed/most_steps", float(most))]
    steps = graph.node("Clip", [steps, *limits], graph.own("packed/steps_clamped"))
    below = graph.node("Floor", [steps], graph.own("packed/steps_below"))
    above = graph.node("Sub", [steps, below], graph.own("packed/part_above"))
    seed = graph.input(Seed(name=graph.own("packed/seed"), dtype="uint32", shape=()))
    bits = add_bits(graph, seed, ROUNDING, shape[0] * shape[1], "rounding")
    # The upper 24 bits, which float32 holds: a number from 0 to below 1.
    upper = graph.node(
        "BitShift",
        [bits, graph.array(graph.own("packed/shift_8"), np.uint32(8))],
        graph.own("packed/rounding_upper"),
        direction="RIGHT",
    )
    whole = graph.node("Cast", [upper], graph.own("packed/rounding_whole"), to=_FLOAT)
    drawn = graph.node(
        "Mul", [whole, graph.constant("packed/two_to_minus_24", 2.0**-24)], graph.own("packed/drawn_flat")
    )
    drawn = graph.node(
        "Reshape", [drawn, graph.array(graph.own("packed/drawn_shape"), np.array(shape))], graph.own("packed/drawn")
    )
    up = graph.node(
        "Cast", [graph.node("Less", [drawn, above], graph.own("packed/goes_up"))], graph.own("packed/up"), to=_FLOAT
    )
    return graph.node("Add", [below, up], graph.own("packed/whole_steps"))
