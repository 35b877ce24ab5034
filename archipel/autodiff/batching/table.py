"""The one table from operator to batching rule, and the operators that no rule can cover."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import onnx_ir as ir

if TYPE_CHECKING:
    from archipel.autodiff.batching.context import LaneContext


@dataclass(frozen=True)
class Shared:
    """A result that is the same in all lanes, and so has no lane axis."""

    value: ir.Value


BatchedResults = Sequence[ir.Value | Shared | None]
BatchRule = Callable[["LaneContext"], BatchedResults]

BATCH_RULES: dict[str, BatchRule] = {}
"""Operator of standard ONNX -> its batching rule. `@batch_rule` fills it; importing the package registers them all. An
operator that is not listed runs lane by lane, in a Scan."""

UNEVEN: dict[str, str] = {
    "Range": "its inputs differ",
    "ConstantOfShape": "its input differs",
    "NonZero": "the number of elements that are not zero differs",
    "Compress": "the number of elements that the condition keeps differs",
    "Unique": "the number of different elements differs",
    "NonMaxSuppression": "the number of boxes that it keeps differs",
    "StringSplit": "the number of parts differs",
    "HannWindow": "its size differs",
    "HammingWindow": "its size differs",
    "BlackmanWindow": "its size differs",
    "MelWeightMatrix": "its inputs differ",
}
"""Operators whose result has another size in every lane -> what decides the size."""

SIZES: dict[str, tuple[int, ...]] = {
    "Reshape": (1,),
    "Expand": (1,),
    "Tile": (1,),
    "Squeeze": (1,),
    "Unsqueeze": (1,),
    "TopK": (1,),
    "OneHot": (1,),
    "Split": (1,),
    "Pad": (1, 3),
    "Resize": (2, 3, 4),
    "Upsample": (1,),
    "CenterCropPad": (1,),
    "AffineGrid": (1,),
    "Col2Im": (1, 2),
    "MaxUnpool": (2,),
    "DFT": (1, 2),
    "STFT": (1, 3),
    "Slice": (3, 4),
}
"""Inputs that decide the size of the result, by position: they may not differ from lane to lane. The starts and
ends of Slice may, as long as all lanes take equally many."""


def batch_rule(*op_types: str) -> Callable[[BatchRule], BatchRule]:
    """Register the batching rule of some operators, as a decorator.

    The rule takes a `LaneContext` and returns one result for each output of the node, in order: a value with the lanes
    as its first axis, `Shared(value)`, or None for an output that the node leaves out.
    """

    def register(function: BatchRule) -> BatchRule:
        for op_type in op_types:
            if op_type in BATCH_RULES:
                raise ValueError(f"batch_rule: {op_type} already has one")
            BATCH_RULES[op_type] = function
        return function

    return register
