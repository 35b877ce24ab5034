"""A training's rounds as lines of text: metrics, clipped devices, seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator

from archipel.cli.input_output.distributions import worst_tenths
from archipel.cli.input_output.remote import metrics_line, result_line
from archipel.operator import OperatorClient, RoundMetrics, RoundResult
from archipel.protocol.operator.tasks import TaskInfo

_POLL_SECONDS = 0.5


class RoundLines:
    """The lines of a task's committed rounds, each once. That of a version's evaluation follows when it has ended."""

    def __init__(self, client: OperatorClient, task_id: str) -> None:
        self._client = client
        self._task_id = task_id
        self._told: set[str] = set()
        self._evaluated: set[str] = set()
        self._last: list[RoundMetrics] = []

    def new(self) -> Iterator[str]:
        """The lines of what happened since the last call."""
        self._last = [each for each in self._client.tasks.metrics(self._task_id) if each.metrics or each.evaluation]
        for each in self._last:
            if each.round_id not in self._told:
                self._told.add(each.round_id)
                yield _round_line(each)
            if each.evaluation is not None and _ended(each) and each.round_id not in self._evaluated:
                self._evaluated.add(each.round_id)
                yield self._evaluation_line(each, each.evaluation)

    def rest(self, seconds: float | None) -> Iterator[str]:
        """The lines that are left when the task has ended, once evaluations that still run have ended."""
        until = None if seconds is None else time.monotonic() + seconds
        while True:
            yield from self.new()
            if not any(each.evaluation_state == "running" for each in self._last):
                return
            if until is not None and time.monotonic() > until:
                return
            time.sleep(_POLL_SECONDS)

    def _evaluation_line(self, each: RoundMetrics, task_id: str) -> str:
        means = {name: value for name, value in each.metrics.items() if name.startswith("evaluation ")}
        if means:
            return f"version {each.number}: {metrics_line({**means, **worst_tenths(each.distributions)}, {})}"
        task: TaskInfo = self._client.tasks.get(task_id)
        return f"version {each.number}: not evaluated, {task.reason}"


def clipped_text(result: RoundResult | None) -> str:
    """How many devices had their update clipped, such as "1 of 8"."""
    return "-" if result is None or result.clipped is None else f"{result.clipped} of {result.devices}"


def result_text(each: RoundMetrics) -> str:
    """The metrics of a round in one line, of a training with those of the version's evaluation."""
    if each.weights_out is None:
        return result_line(each.result)
    clamped = {} if each.result is None else each.result.clamped
    return metrics_line({**each.metrics, **worst_tenths(each.distributions)}, clamped)


def _round_line(each: RoundMetrics) -> str:
    trained = {name: value for name, value in each.metrics.items() if not name.startswith("evaluation ")}
    clamped = {} if each.result is None else each.result.clamped
    clipped = clipped_text(each.result)
    parts = [metrics_line(trained, clamped)] if trained else []
    parts += [] if clipped == "-" else [f"{clipped} clipped"]
    return f"round {each.number}: {', '.join([*parts, f'{each.ended - each.started:.1f} s'])}"


def _ended(each: RoundMetrics) -> bool:
    return each.evaluation_state in ("completed", "failed", "cancelled")
