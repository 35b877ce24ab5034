"""How long a prediction takes on this device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from archipel.bundle import Bundle
from archipel.bundle.roles import Example
from archipel.lite_runtime.self_test import one_example, read_vectors
from archipel.lite_runtime.training.driver import need_program

if TYPE_CHECKING:
    from archipel.lite_runtime.interface import ModelRuntime

_WARM_UP, _LEAST, _MOST = 3, 5, 200
_SECONDS = 0.3
_FREE = 32
"""The size of a free dimension, such as a length, where no example tells one."""


def time_prediction(runtime: ModelRuntime, example: Mapping[str, np.ndarray]) -> float:
    """Median seconds of `runtime.predict(example)`; takes a third of a second, more for slow models."""
    for _ in range(_WARM_UP):
        runtime.predict(example)
    times: list[float] = []
    end = time.perf_counter() + _SECONDS
    while len(times) < _LEAST or (len(times) < _MOST and time.perf_counter() < end):
        begin = time.perf_counter()
        runtime.predict(example)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def first_example(bundle: Bundle, fields: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One example for `predict`, the first of `fields`, or as many of it as a graph with a fixed batch takes.

    Where `fields` lacks an input it is zeros. Raises RuntimeProgramError for a bundle that does not predict.
    """
    made = {}
    for port in _examples(bundle):
        given = fields.get(port.name)
        first = np.zeros(one_example(port.shape, _FREE), port.dtype) if given is None else given[:1]
        batch = port.shape[0] if isinstance(port.shape[0], int) else 1
        made[port.name] = np.repeat(first[:1], batch, axis=0)
    return made


def published_example(bundle: Bundle) -> dict[str, np.ndarray]:
    """The same of the bundle's self-test, or zeros."""
    test = bundle.manifest.self_test
    if test is None:
        return first_example(bundle, {})
    examples, _ = read_vectors(bundle, bundle.program(need_program(bundle, "predict", "be measured")), test)
    return first_example(bundle, examples)


def _examples(bundle: Bundle) -> list[Example]:
    program = bundle.program(need_program(bundle, "predict", "be measured"))
    return [port for port in program.inputs if isinstance(port, Example)]
