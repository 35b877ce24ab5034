"""The parts of a recipe: frozen dataclasses, each of which changes a model in one way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from archipel.compression.compressed import CompressedModel
    from archipel.compression.work import Work


Need = Literal["data", "calibration", "validation"]
"""The argument of `compress` with examples that a part needs. Training data stand in for calibration data."""


class Part(Protocol):
    """A step of a recipe. Its fields are numbers, strings, booleans, tuples of these, or another such dataclass."""

    @property
    def needs(self) -> tuple[Need, ...]:
        """The examples that `apply` asks `work` for: `compress` refuses a run without them before the first part."""

    def apply(self, model: CompressedModel, work: Work) -> CompressedModel:
        """The changed model; `model` stays as it is. Raises CompressionError where the part cannot be applied."""


Recipe = Sequence[Part]
"""Parts in the order in which they are applied: structure first, then masks, then quantization."""
