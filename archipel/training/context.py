"""What an optimizer or a gradient transform may use of the step that it becomes part of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

import onnx_ir as ir

Anchor = Literal["start", "broadcast"]


class StepContext(Protocol):
    """The step under construction. A value becomes an input of the program when it is first used."""

    @property
    def hyperparameters(self) -> Mapping[str, ir.Value]:
        """Scalars, float32, by name."""

    def step(self) -> ir.Value:
        """How many updates the optimizer made before this one in the round: int64 scalar, 0 in the first."""

    def state(self, parameter: ir.Value, name: str) -> ir.Value:
        """Round state called `name`/PARAMETER, in the shape of the parameter: what a `begin` program made."""

    def anchor(self, parameter: ir.Value, kind: Anchor) -> ir.Value:
        """`parameter` as it was when the round started, or the tensor of its name that the server broadcast."""
