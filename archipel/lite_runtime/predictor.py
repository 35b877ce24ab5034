"""Answers of the `predict` program for the present parameters."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from archipel.bundle import Program
from archipel.bundle.roles import Example
from archipel.errors import RuntimeInputError
from archipel.lite_runtime.engines.program_session import ProgramSession
from archipel.lite_runtime.fields import check_array
from archipel.lite_runtime.values import Values


class Predictor:
    """A session with everything bound that is not an example. A change of parameters needs a new Predictor."""

    def __init__(self, session: ProgramSession, program: Program, values: Values) -> None:
        self._session = session
        self._examples = [port for port in program.inputs if isinstance(port, Example)]
        self._constant = {
            port.name: session.value(np.asarray(values.read(port), order="C"))
            for port in program.inputs
            if not isinstance(port, Example)
        }
        self._outputs = [port.name for port in program.outputs]
        # The dtype and shape of the usual input, whose check then costs only three comparisons.
        self._only = self._examples[0] if len(self._examples) == len(self._outputs) == 1 else None
        self._dtype = np.dtype(self._examples[0].dtype) if self._examples else None
        self._rest = self._examples[0].shape[1:] if self._examples and self._has_free_batch(self._examples[0]) else None

    @property
    def fields(self) -> list[str]:
        """The names of the example fields."""
        return [port.name for port in self._examples]

    def one(self, x: np.ndarray) -> np.ndarray:
        """Array in, array out. Raises RuntimeInputError."""
        only = self._only
        if only is not None and type(x) is np.ndarray and x.shape[1:] == self._rest and x.dtype == self._dtype:
            return self._session.run(self._outputs, {only.name: x, **self._constant})[0]
        if len(self._examples) != 1 or len(self._outputs) != 1:
            raise RuntimeInputError(
                f"predict: array in, array out needs one example field and one output; the program has "
                f"{[port.name for port in self._examples]} and {self._outputs}; give and take dicts"
            )
        port = self._examples[0]
        check_array("predict", port, x, {})
        return self._session.run(self._outputs, {port.name: np.asarray(x, order="C"), **self._constant})[0]

    @staticmethod
    def _has_free_batch(port: Example) -> bool:
        # With only the batch axis free, comparing the other axes checks the whole shape.
        free = [axis for axis, dim in enumerate(port.shape) if isinstance(dim, str)]
        return free == [0]

    def many(self, x: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Arrays by field name in, arrays by output name out. Raises RuntimeInputError."""
        dims: dict[str, tuple[int, str]] = {}
        feed = dict(self._constant)
        for port in self._examples:
            if port.name not in x:
                raise RuntimeInputError(f"predict: field {port.name!r} is missing; given: {', '.join(sorted(x))}")
            check_array("predict", port, x[port.name], dims)
            feed[port.name] = np.asarray(x[port.name], order="C")
        unknown = sorted(set(x) - {port.name for port in self._examples})
        if unknown:
            raise RuntimeInputError(
                f"predict: {', '.join(unknown)} is not a field of the program: "
                f"{', '.join(port.name for port in self._examples)}"
            )
        return dict(zip(self._outputs, self._session.run(self._outputs, feed)))
