"""What a recipe is made of: frozen dataclasses, each of which changes a model in one way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from archipel.compression.compressed import CompressedModel
    from archipel.compression.work import Work


class Part(Protocol):
    """A step of a recipe. Its fields are numbers, strings, booleans, tuples of these, or another such dataclass."""

    def apply(self, model: CompressedModel, work: Work) -> CompressedModel:
        """The changed model; `model` stays as it is. Raises CompressionError where the part cannot be applied."""


Recipe = Sequence[Part]
"""Parts in the order in which they are applied: structure first, then masks, then quantization."""
