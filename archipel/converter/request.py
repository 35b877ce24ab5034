"""Everything that one call of `convert` asks for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from archipel.bundle import ModelCard, PrivacyPolicy
from archipel.compression.part import Part
from archipel.converter.options import BATCH_SIZE, Analysis, Compression, Signing, Training
from archipel.lite_runtime.agreement import MIN_AGREEMENT, MIN_SNR

SUFFIX = ".bundle"
DEFAULT_PRIVACY = PrivacyPolicy(
    modes=("secure",), min_cohort=10, threshold=0.67, max_clip=1000.0, max_bits=24, protocols=("complete", "neighbours")
)


@dataclass(frozen=True, eq=False)  # comparing arrays gives arrays, not True or False
class Request:
    """The arguments of `convert`.

    `batch_size` is the number of examples for which the limits of a bundle without training are counted. Limits of one
    with training are counted for the batch size of `training`.
    """

    source: Any
    path: str | os.PathLike[str]
    signing: Signing
    training: Training | None = None
    analysis: Analysis | None = None
    compression: Compression | None = None
    example: Any = None
    name: str | None = None
    privacy: PrivacyPolicy = DEFAULT_PRIVACY
    self_test: Mapping[str, np.ndarray] | None = None
    min_agreement: float = MIN_AGREEMENT
    min_snr: float = MIN_SNR
    card: ModelCard | None = None
    batch_size: int = BATCH_SIZE

    @property
    def bundle_name(self) -> str:
        return self.name or Path(self.path).name.removesuffix(SUFFIX)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of the recipe; empty where the model is not compressed."""
        return () if self.compression is None else self.compression.parts

    @property
    def rows(self) -> int:
        """How many examples devices compute with at once, for the limits."""
        return self.batch_size if self.training is None else self.training.batch_size
