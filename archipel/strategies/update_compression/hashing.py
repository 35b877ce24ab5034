"""The counter-based hash of step graphs (archipel/training/hashing.py), as nodes of `finish`.

For the seed s, the number n of a stream and the counter i, all uint32: bits(i ^ a, b) with a = mix(mix(s) ^ n) and
b = mix(mix(s) ^ (n + 1)). archipel.permutations.draw_bits draws the same in NumPy. The
streams of step graphs have the number of a step there, which is small; those of `finish` begin at
protocol.noised.rotation.FIRST, so they draw other bits of the same seed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from archipel.strategies.program import ProgramGraph

_FACTORS = 0x7FEB352D, 0x846CA68B


def add_bits(graph: ProgramGraph, seed: str, stream: int, count: int, prefix: str) -> str:
    """Add what draws the same bits of `seed` (the name of a uint32 scalar). Returns the name of uint32 `[count]`."""

    def own(name: str) -> str:
        return graph.own(f"packed/{prefix}_{name}")

    base = _add_mix(graph, seed, own("base"))
    keys = [
        _add_mix(
            graph,
            graph.node("BitwiseXor", [base, graph.array(own(f"number_{i}"), np.uint32(stream + i))], own(f"xor_{i}")),
            own(f"key_{i}"),
        )
        for i in (0, 1)
    ]
    ends = [graph.array(own(name), np.int64(value)) for name, value in (("from", 0), ("to", count), ("by", 1))]
    counters = graph.node("Cast", [graph.node("Range", ends, own("range"))], own("counters"), to=12)
    return _add_mix(graph, graph.node("BitwiseXor", [counters, keys[0]], own("started")), own("bits"), keys[1])


def _add_mix(graph: ProgramGraph, words: str, output: str, key: str | None = None) -> str:
    factors = [graph.array(graph.own(f"packed/factor_{i}"), np.uint32(factor)) for i, factor in enumerate(_FACTORS)]
    words = graph.node("Mul", [_add_fold(graph, words, 16, f"{output}/0"), factors[0]], f"{output}/1")
    words = _add_fold(graph, words, 15, f"{output}/2")
    if key is not None:
        words = graph.node("BitwiseXor", [words, key], f"{output}/3")
    words = graph.node("Mul", [words, factors[1]], f"{output}/4")
    return _add_fold(graph, words, 16, output)


def _add_fold(graph: ProgramGraph, words: str, shift: int, output: str) -> str:
    by = graph.array(graph.own(f"packed/shift_{shift}"), np.uint32(shift))
    shifted = graph.node("BitShift", [words, by], f"{output}/shifted", direction="RIGHT")
    return graph.node("BitwiseXor", [words, shifted], output)
