"""Augmentations by name, and settings in words, as configurations have them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import reduce

from archipel.errors import TrainingError
from archipel.preprocessing import Transform
from archipel.training.by_name import Maker, make_named
from archipel.training.cloud import augment

AUGMENTATIONS: dict[str, Maker] = {
    make.__name__: make for make in (augment.random_shift, augment.random_flip, augment.random_scale)
}


def make_augment(value: object) -> augment.Augment | None:
    """An augmentation from a name, a table, a transform, a function or a list of these."""
    if value is None or callable(value):
        return value
    if isinstance(value, str | Mapping):
        value = make_named(AUGMENTATIONS, value, "augment")
    if isinstance(value, Transform):
        return augment.Changes(value)
    if isinstance(value, Sequence) and value:
        steps = [step for each in value if (step := make_augment(each)) is not None]
        return lambda batch, generator: reduce(lambda changed, step: step(changed, generator), steps, batch)
    raise TrainingError(f"augment: expected a name, a table, a transform, a function or a list of these, got {value!r}")


def describe(value: object) -> str:
    """A setting in words that are the same in every process."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {describe(each)}" for key, each in sorted(value.items())) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(describe, value)) + "]"
    if inspect.isroutine(value) or isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    text = repr(value)
    return type(value).__name__ if " at 0x" in text else text
