"""Rotated updates on the device, as nodes of `finish`: rotate, take some of the elements, and round to steps by chance.

Stochastic rounding takes the step above with the probability of the part above the step below, so its mean is the
number itself: the errors of many devices cancel, where rounding to the nearest step would turn all small numbers to 0.
The random numbers come from the round's `seed`, which follows from a secret of the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from archipel.bundle.carried import MOST_SEED, UPDATE_SEED
from archipel.bundle.roles import Hyperparameter, Rotation, Seed, Update
from archipel.protocol.noised.rotation import PLACES, ROUNDING, SIGNS, SPREAD, choose_block
from archipel.strategies.update_compression.hashing import add_bits
from archipel.strategies.update_compression.shortening import add_shortened

if TYPE_CHECKING:
    from archipel.strategies.device import LocalTraining, Upload, Weighting
    from archipel.strategies.program import ProgramGraph

_FLOAT, _INT64, _UINT32 = 1, 7, 12


@dataclass
class Rotated:
    """What one `finish` needs to upload all changes as one rotated vector; `taken` of its elements, 0: all."""

    graph: ProgramGraph
    local: LocalTraining
    upload: Upload
    weighting: Weighting
    taken: int = 0

    def __post_init__(self) -> None:
        self.size = sum(array.size for array in self.local.parameters.values())
        self.block = choose_block(self.size)
        self.blocks = -(-self.size // self.block)
        self.count = self.blocks * self.block
        self._signs = ""
        if self.taken >= self.count:
            self.taken = 0

    def upload_all(self, flat: str) -> None:
        """Add the output of the whole vector `[size]`."""
        self._output(self._rotate(flat), (self.blocks, self.block))

    def upload_taken(self, flat: str) -> tuple[str, str]:
        """Add the output of some elements. Returns the names of the vector that these stand for, `[size]`, and of the
        factor that shortened them to the clip."""
        graph = self.graph
        rotated = self._reshape(self._rotate(flat), (self.count,), "line")
        drawn = graph.node(
            "Cast", [self._bits(self._public_seed(), PLACES, "places")], self._own("place_keys"), to=_INT64
        )
        places = graph.largest(drawn, self.taken, self._own("places"))
        chosen = graph.node("Gather", [rotated, places], self._own("chosen"))
        chosen, shrink = add_shortened(graph, chosen, self.weighting)
        rounded = self._output(chosen, (self.taken,))
        nothing = graph.array(self._own("nothing"), np.zeros(self.count, np.float32))
        line = graph.node("ScatterElements", [nothing, places, rounded], self._own("spread"))
        return self._unrotate(self._reshape(line, (self.blocks, self.block), "spread_rows")), shrink

    def _output(self, elements: str, shape: tuple[int, ...]) -> str:
        """Add the output of the elements, rounded to whole steps, and return its name."""
        graph, upload = self.graph, self.upload
        # The range follows the clip, as in protocol.uploads.plan_layout.
        share = min(1.0, SPREAD / math.sqrt(math.prod(shape)))
        span = upload.bound * share if upload.value_range is None else upload.range
        most = (1 << (upload.bits - 1)) - 1
        step_share = self._constant("step_share", span / upload.bound / most)
        step = graph.node("Mul", [graph.own("clip"), step_share], self._own("step"))
        rounded = graph.node("Mul", [self._round(elements, step, most, shape), step], self._own("update"))
        carries = Rotation(
            parameters=tuple(self.local.parameters), block=self.block, taken=self.taken if len(shape) == 1 else 0
        )
        graph.output(
            Update(
                name=rounded, tensor=graph.own("packed"), dtype="float32", shape=shape, kind="delta",
                weighting=self.weighting, range=span, bits=upload.bits, clip=upload.bound, carries=carries,
            )
        )  # fmt: skip
        return rounded

    def _rotate(self, flat: str) -> str:
        graph = self.graph
        if self.count > self.size:
            padding = graph.array(self._own("padding"), np.zeros(self.count - self.size, np.float32))
            flat = graph.node("Concat", [flat, padding], self._own("padded"), axis=0)
        dealt = self._reshape(flat, (self.block, self.blocks), "dealt")
        rows = graph.node("Transpose", [dealt], self._own("dealt_rows"), perm=[1, 0])
        return self._transform(graph.node("Mul", [rows, self._add_signs()], self._own("signed")), "rotated")

    def _unrotate(self, rows: str) -> str:
        graph = self.graph
        signed = graph.node("Mul", [self._transform(rows, "back"), self._add_signs()], self._own("back_signed"))
        columns = graph.node("Transpose", [signed], self._own("back_columns"), perm=[1, 0])
        flat = self._reshape(columns, (self.count,), "back_line")
        if self.count == self.size:
            return flat
        ends = [graph.array(self._own(name), np.array([value])) for name, value in (("start", 0), ("stop", self.size))]
        return graph.node("Slice", [flat, *ends], self._own("back_vector"))

    def _transform(self, rows: str, prefix: str) -> str:
        """Add the Walsh-Hadamard transform of each row, divided by the root of the block.

        That of 2^(a + b) elements is that of 2^a, and that of 2^b, along the two axes of a matrix: two products of
        matrices, which every runtime has.
        """
        graph, power = self.graph, self.block.bit_length() - 1
        left, right = 1 << (power // 2), 1 << (power - power // 2)
        split = self._reshape(rows, (self.blocks, left, right), f"{prefix}_matrices")
        along = graph.node("MatMul", [split, self._hadamard(right)], self._own(f"{prefix}_along"))
        both = graph.node("MatMul", [self._hadamard(left), along], self._own(f"{prefix}_both"))
        return self._reshape(both, (self.blocks, self.block), f"{prefix}_rows")

    def _hadamard(self, size: int) -> str:
        """Sylvester's matrix, divided by the root of its size."""
        matrix = np.ones((1, 1))
        while len(matrix) < size:
            matrix = np.block([[matrix, matrix], [matrix, -matrix]])
        return self.graph.array(self._own(f"hadamard_{size}"), (matrix / math.sqrt(size)).astype(np.float32))

    def _public_seed(self) -> str:
        port = Hyperparameter(name=UPDATE_SEED, dtype="float32", shape=(), default=0.0, minimum=0.0, maximum=MOST_SEED)
        given = self.graph.input(port)
        if not self._signs:
            self.graph.node("Cast", [given], self._own("public_seed"), to=_UINT32)
        return self._own("public_seed")

    def _add_signs(self) -> str:
        if self._signs:
            return self._signs
        graph = self.graph
        top = self._shifted(self._bits(self._public_seed(), SIGNS, "signs"), 31, "sign_bits")
        negative = graph.node("Cast", [top], self._own("negative"), to=_FLOAT)
        twice = graph.node("Mul", [negative, self._constant("two", 2.0)], self._own("negative_twice"))
        signs = graph.node("Sub", [self._constant("unit", 1.0), twice], self._own("sign_line"))
        self._signs = self._reshape(signs, (self.blocks, self.block), "signs")
        return self._signs

    def _round(self, elements: str, step: str, most: int, shape: tuple[int, ...]) -> str:
        """Add whole numbers of steps, from -most to most."""
        graph = self.graph
        steps = graph.node("Div", [elements, step], self._own("steps"))
        limits = [self._constant("least_steps", -float(most)), self._constant("most_steps", float(most))]
        steps = graph.node("Clip", [steps, *limits], self._own("steps_clamped"))
        below = graph.node("Floor", [steps], self._own("steps_below"))
        above = graph.node("Sub", [steps, below], self._own("part_above"))
        seed = graph.input(Seed(name=self._own("seed"), dtype="uint32", shape=()))
        bits = add_bits(graph, seed, ROUNDING, math.prod(shape), "rounding")
        # The upper 24 bits, which float32 holds: a number from 0 to below 1.
        whole = graph.node("Cast", [self._shifted(bits, 8, "upper_bits")], self._own("upper"), to=_FLOAT)
        line = graph.node("Mul", [whole, self._constant("two_to_minus_24", 2.0**-24)], self._own("drawn_line"))
        rises = graph.node("Less", [self._reshape(line, shape, "drawn"), above], self._own("rises"))
        return graph.node("Add", [below, graph.node("Cast", [rises], self._own("up"), to=_FLOAT)], self._own("whole"))

    def _bits(self, seed: str, stream: int, prefix: str) -> str:
        return add_bits(self.graph, seed, stream, self.count, prefix)

    def _shifted(self, bits: str, by: int, output: str) -> str:
        shift = self.graph.array(self._own(f"by_{by}"), np.uint32(by))
        return self.graph.node("BitShift", [bits, shift], self._own(output), direction="RIGHT")

    def _reshape(self, value: str, shape: tuple[int, ...], output: str) -> str:
        sizes = self.graph.array(self._own(f"{output}_shape"), np.array(shape))
        return self.graph.node("Reshape", [value, sizes], self._own(output))

    def _constant(self, name: str, value: float) -> str:
        return self.graph.constant(f"packed/{name}", value)

    def _own(self, name: str) -> str:
        return self.graph.own(f"packed/{name}")
