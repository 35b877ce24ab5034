"""Files of weights: which of their tensors are a model's parameters."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

_PARAMETER = "parameter/"
"""Before names in files that hold more than parameters: of simulations, and of what devices learned."""


def parameters_of(arrays: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """The parameters alone, of a file that holds more than them and says which they are."""
    named = {name.removeprefix(_PARAMETER): array for name, array in arrays.items() if name.startswith(_PARAMETER)}
    return named or arrays
