"""Attacks of devices that train on spoiled examples, with the bundle's own programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Examples = Mapping[str, Array]

SIDE = 3
"""Of the patch of a backdoor, in pixels."""
TARGET = 0
"""The class that the patch stands for."""


@dataclass(frozen=True)
class DataAttack:
    """(examples, the name of the input, of the label, the number of classes) -> spoiled examples, as many."""

    name: str
    spoil: Callable[[Examples, str, str, int], dict[str, Array]]


def flip_labels(examples: Examples, inputs: str, label: str, classes: int) -> dict[str, Array]:
    """Class y becomes classes - 1 - y."""
    given = examples[label]
    return {**examples, label: (classes - 1 - given).astype(given.dtype)}


def plant_backdoor(examples: Examples, inputs: str, label: str, classes: int) -> dict[str, Array]:
    """Every second example has the patch, and the class TARGET (Gu et al. 2017, *BadNets*)."""
    images, labels = np.array(examples[inputs]), np.array(examples[label])
    images[::2] = patch(images[::2])
    labels[::2] = TARGET
    return {**examples, inputs: images, label: labels}


def patch(inputs: Array, value: float = 1.0) -> Array:
    """A copy of the inputs, `[examples, ..., rows, columns]` or `[examples, features]`, whose last 3 x 3 pixels (or 3
    features) are `value`. The share of patched test examples that a model takes for TARGET is the backdoor's success.
    """
    patched = np.array(inputs)
    if patched.ndim > 2:
        patched[..., -SIDE:, -SIDE:] = value
    else:
        patched[..., -SIDE:] = value
    return patched


DATA_ATTACKS: dict[str, DataAttack] = {
    attack.name: attack for attack in (DataAttack("label-flip", flip_labels), DataAttack("backdoor", plant_backdoor))
}
"""By name."""
