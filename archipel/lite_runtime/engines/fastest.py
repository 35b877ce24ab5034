"""A session that measures its first run on every engine that can run the program, and keeps the fastest.

It measures with the caller's own arrays, once a process for each graph and number of threads: each engine runs them
several times, in turns. A training step reads one set of buffers and writes another, so repeating it changes nothing.
An engine that fails, or whose answers differ from ONNX Runtime's, is left out.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from archipel.errors import RuntimeProgramError
from archipel.lite_runtime.engines.delegates import ProgramPlacement, Skipped
from archipel.lite_runtime.engines.program_session import Arrays, ProgramSession

ROUNDS, MOST_SECONDS = 7, 2.0
TOLERANCE = 1e-3
"""Largest difference of floating-point answers, over the largest of ONNX Runtime's or 1."""

Calls = Mapping[str, Callable[[], Any]]


class FastestSession(ProgramSession):
    """A program in several engines, of which the first run leaves one.

    Arguments:
        sessions: by delegate; the first is ONNX Runtime's, whose answers are those that the others must give.
        decided: called once, with the delegate that is left.
    """

    def __init__(self, sessions: Mapping[str, ProgramSession], decided: Callable[[str], None]) -> None:
        first = next(iter(sessions.values()))
        self.name, self.inputs, self.outputs = first.name, first.inputs, first.outputs
        self._sessions = dict(sessions)
        self._decided = decided
        self._chosen: ProgramSession | None = None
        self._left_out: list[Skipped] = []
        self._lock = threading.Lock()

    @property
    def native(self) -> Any:
        return self._first.native

    @property
    def _first(self) -> ProgramSession:
        """The one that is left, or ONNX Runtime's."""
        return next(iter(self._sessions.values()))

    def run(self, outputs: Sequence[str], feed: Mapping[str, Any]) -> list[np.ndarray]:
        # A run without examples says nothing about the engines.
        if self._chosen is None and all(np.size(array) for array in feed.values()):
            answers: dict[str, list[np.ndarray]] = {}

            def call(name: str, session: ProgramSession) -> Callable[[], list[np.ndarray]]:
                def run() -> list[np.ndarray]:
                    answers[name] = session.run(outputs, feed)
                    return answers[name]

                return run

            with self._lock:
                if self._chosen is None:
                    self._choose({name: call(name, each) for name, each in self._sessions.items()})
        return self._first.run(outputs, feed)

    def bind(
        self, inputs: Arrays, outputs: Arrays, bound: dict[int, Any] | None = None, kept: Collection[str] = ()
    ) -> Callable[[], None]:
        runs: dict[str, Callable[[], None]] = {}
        with self._lock:
            for name, session in list(self._sessions.items()):
                try:
                    runs[name] = session.bind(inputs, outputs, bound)
                except RuntimeProgramError as error:
                    if session is self._first:
                        raise
                    self._leave_out(name, str(error))

        def answer(name: str) -> Callable[[], list[np.ndarray]]:
            def run() -> list[np.ndarray]:
                runs[name]()
                return list(outputs.values())

            return run

        def run() -> None:
            with self._lock:
                if self._chosen is None:
                    self._choose({name: answer(name) for name in runs if name in self._sessions})
            for name in set(runs) - set(self._sessions):
                del runs[name]
            [last] = runs.values()
            last()

        return run

    def value(self, array: np.ndarray) -> Any:
        return array

    def placement(self) -> ProgramPlacement:
        if self._chosen is not None:
            return self._chosen.placement()
        return ProgramPlacement(self.name, tuple(self._sessions), None)

    def skipped(self) -> Sequence[Skipped]:
        return self._left_out

    def _choose(self, calls: Calls) -> None:
        first, *others = calls
        expected = [array.copy() for array in calls[first]()]
        for name in others:
            try:
                worst = difference(calls[name](), expected)
            except RuntimeProgramError as error:
                self._leave_out(name, str(error))
            else:
                if worst > TOLERANCE:
                    self._leave_out(name, f"its answers differ by {worst:.2g} from {first}'s")
        times = measure({name: call for name, call in calls.items() if name in self._sessions})
        best = min(times, key=lambda name: times[name])
        for name, seconds in times.items():
            if name != best:
                told = f"slower here: {1e3 * seconds:.3g} ms a run, {best} {1e3 * times[best]:.3g} ms"
                self._leave_out(name, told)
        self._chosen = self._first
        self._decided(best)

    def _leave_out(self, name: str, reason: str) -> None:
        self._left_out.append(Skipped(name, self.name, reason))
        del self._sessions[name]


def measure(calls: Calls) -> dict[str, float]:
    """Median seconds of a call, in turns; ROUNDS of them, or as many as fit into MOST_SECONDS."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + MOST_SECONDS
    for _ in range(ROUNDS):
        for name, call in calls.items():
            call()  # others have used the caches meanwhile
            started = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - started)
        if time.perf_counter() > end:
            break
    return {name: statistics.median(each) for name, each in times.items()}


def difference(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """The largest one of any array; infinite where other elements are finite, or whole numbers are not the same."""
    worst = 0.0
    for array, other in zip(found, expected, strict=True):
        floating = other.dtype.kind == "f"
        finite = np.isfinite(other) if floating else np.array(True)
        if array.shape != other.shape or not np.array_equal(np.isfinite(array) if floating else array == other, finite):
            return np.inf
        if floating and finite.any():
            scale = max(1.0, float(np.abs(other[finite]).max()))
            worst = max(worst, float(np.abs(array[finite] - other[finite]).max()) / scale)
    return worst
