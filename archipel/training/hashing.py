"""A counter-based random number generator in integer operators: the same bits in every runtime.

Element i of stream n in minibatch t draws, for the round's seed s and all in uint32:

    base = mix(mix(s) ^ t);   a = mix(base ^ 2n);   b = mix(base ^ (2n + 1))
    x = i ^ a;   x = (x ^ x >> 16) * 0x7feb352d;   x = ((x ^ x >> 15) ^ b) * 0x846ca68b;   bits = x ^ x >> 16

mix is the same with b = 0: lowbias32 of C. Wellons, "Prospecting for Hash Functions" (2018). Without b two streams of
n elements would overlap with probability 2n / 2**32. Not for secrets: noise for privacy comes from a cryptographic
generator (`lite_runtime.noise`).
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from archipel.bundle.roles import Seed
from archipel.graph.build import Builder
from archipel.training.assembly import Assembly
from archipel.training.update import minibatch

Keys = tuple[ir.Value, ir.Value]
"""The keys of one stream: two uint32 scalars, a and b."""


class Streams:
    """Streams of random numbers for one step, numbered in the order in which they are made."""

    def __init__(self, work: Assembly) -> None:
        self._work = work
        self._seed = work.input(Seed, "seed", ir.DataType.UINT32, [])
        self._step = minibatch(work)
        self._base: ir.Value | None = None
        self.keys: list[Keys] = []

    def keys_of_next(self) -> Keys:
        """The keys of a new stream, emitted where the builder is."""
        op = self._work.op
        # Not in the constructor, which runs while the builder is at the graph's end, behind the readers of the masks.
        if self._base is None:
            self._base = mix(op, op.BitwiseXor(mix(op, self._seed), op.Cast(self._step, to=int(ir.DataType.UINT32))))
        number = 2 * len(self.keys)  # mix is a bijection, so different numbers give different keys
        a, b = (mix(op, op.BitwiseXor(self._base, _number(op, number + i))) for i in (0, 1))
        self.keys.append((a, b))
        return a, b


def bits(op: Builder, counters: ir.Value, keys: Keys) -> ir.Value:
    """32 random bits for each counter (uint32, any shape)."""
    return mix(op, op.BitwiseXor(counters, keys[0]), keys[1])


def mix(op: Builder, value: ir.Value, key: ir.Value | None = None) -> ir.Value:
    """lowbias32 of uint32 numbers, with the key halfway."""
    value = op.Mul(_fold(op, value, 16), _number(op, 0x7FEB352D))
    value = _fold(op, value, 15)
    if key is not None:
        value = op.BitwiseXor(value, key)
    return _fold(op, op.Mul(value, _number(op, 0x846CA68B)), 16)


def _fold(op: Builder, value: ir.Value, shift: int) -> ir.Value:
    return op.BitwiseXor(value, op.BitShift(value, _number(op, shift), direction="RIGHT"))


def _number(op: Builder, value: int) -> ir.Value:
    return op.constant(np.array(value, np.uint32))
