"""Tasks: trainings, evaluations and analyses that devices do for a number of rounds."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator

from archipel.operator.connection import Resource, make_path
from archipel.operator.waiting import wait_until_ended
from archipel.protocol.operator.progress import TaskProgress
from archipel.protocol.operator.registry import MetricsPage, RoundMetrics
from archipel.protocol.operator.tasks import RoundInfo, RoundPage, TaskInfo, TaskPage, TaskRequest

SLOW_SECONDS = 10.0


class Tasks(Resource):
    """`OperatorClient.tasks`. In all methods `task_id` is a task's id, 32 hexadecimal digits (`TaskInfo.task_id`)."""

    def create(self, request: TaskRequest, *, key: str | None = None) -> TaskInfo:
        """Have the devices of a population train or evaluate a bundle, or analyse data with it.

        Route: POST /v1/tasks

        Args:
            request: the task; times in it are in seconds.
            key: with the same key (16 to 64 letters, digits, "-" or "_") the same task is made only once, however often
                this is called; None: once for this call, however often it has to be sent.

        Returns:
            The new task: running, or proposed where queries need an approval.

        Raises:
            RefusedError: 403: a training needs the role operator, an evaluation or analysis the role analyst, and the
                token must be for the population. 409: the key was used for another request. 422: the bundle or the
                weights are not there, or the bundle does not do what is asked for; the text says which.
        """
        return self._connection.post("/v1/tasks", TaskInfo, request, key=key)

    def list(
        self,
        *,
        starts: str | None = None,
        population: str | None = None,
        state: str | None = None,
        kind: str | None = None,
        since: float | None = None,
    ) -> Iterator[TaskInfo]:
        """Go through the tasks of the token's populations, all of them or those that are asked for.

        Route: GET /v1/tasks

        Args:
            starts: only those whose id begins with these hexadecimal digits; None: all.
            population: only those of this population.
            state: only those in this state: proposed, running, paused, completed, cancelled or failed.
            kind: only those of this kind: training, evaluation or analytics.
            since: only those created from then on, in Unix seconds.

        Returns:
            The tasks, newest first, fetched as they are reached.

        Raises:
            RefusedError: no status that other calls do not have; at the first item.
        """
        return self._connection.pages(
            "/v1/tasks", TaskPage, starts=starts, population=population, state=state, kind=kind,
            since=None if since is None else repr(float(since)),
        )  # fmt: skip

    def get(self, task_id: str) -> TaskInfo:
        """Look at one task: its request, and its progress.

        Route: GET /v1/tasks/<task_id>

        Args:
            task_id: the task's id.

        Returns:
            The task as it is now.

        Raises:
            RefusedError: 404: there is no such task for this token.
        """
        return self._connection.get(make_path("tasks", task_id), TaskInfo)

    def approve(self, task_id: str) -> TaskInfo:
        """Let a proposed evaluation or analysis run that somebody else asked for.

        Route: POST /v1/tasks/<task_id>/approve

        Args:
            task_id: the task's id.

        Returns:
            The task, now running.

        Raises:
            RefusedError: 403: the token lacks the role analyst, or it is the one that asked. 404: there is no such
                task for this token. 409: the task is not proposed, or the rollout that it is for is paused.
        """
        return self._connection.post(make_path("tasks", task_id, "approve"), TaskInfo)

    def cancel(self, task_id: str) -> TaskInfo:
        """Stop a task for good; the server discards the round under way, and cancels a training's evaluation with it.

        Route: POST /v1/tasks/<task_id>/cancel

        Args:
            task_id: the task's id.

        Returns:
            The task, now ended.

        Raises:
            RefusedError: 403: the token's role may not stop tasks of this kind. 404: there is no such task for this
                token.
        """
        return self._connection.post(make_path("tasks", task_id, "cancel"), TaskInfo)

    def pause(self, task_id: str) -> TaskInfo:
        """Let the server open no further rounds; it finishes the round under way.

        Route: POST /v1/tasks/<task_id>/pause

        Args:
            task_id: the task's id.

        Returns:
            The task, now paused.

        Raises:
            RefusedError: 403: the token's role may not pause tasks of this kind. 404: there is no such task for this
                token. 409: the task is proposed or has ended.
        """
        return self._connection.post(make_path("tasks", task_id, "pause"), TaskInfo)

    def resume(self, task_id: str) -> TaskInfo:
        """Let the server open rounds of a paused task again.

        Route: POST /v1/tasks/<task_id>/resume

        Args:
            task_id: the task's id.

        Returns:
            The task, now running.

        Raises:
            RefusedError: 403: a training needs the role operator, an evaluation or analysis the role analyst. 404:
                there is no such task for this token. 409: the task is proposed or has ended.
        """
        return self._connection.post(make_path("tasks", task_id, "resume"), TaskInfo)

    def rounds(self, task_id: str, *, starts: str | None = None) -> Iterator[RoundInfo]:
        """Go through all rounds of a task, failed ones too, with how far each participant came.

        Route: GET /v1/tasks/<task_id>/rounds

        Args:
            task_id: the task's id.
            starts: only those whose id begins with these hexadecimal digits; None: all.

        Returns:
            The rounds, oldest first, fetched as they are reached.

        Raises:
            RefusedError: 404: there is no such task for this token; at the first item.
        """
        return self._connection.pages(make_path("tasks", task_id, "rounds"), RoundPage, starts=starts)

    def metrics(self, task_id: str) -> Iterator[RoundMetrics]:
        """Go through the results of a task's committed rounds, without their participants.

        Route: GET /v1/tasks/<task_id>/metrics

        Args:
            task_id: the task's id.

        Returns:
            The results, oldest first, fetched as they are reached.

        Raises:
            RefusedError: 404: there is no such task for this token; at the first item.
        """
        return self._connection.pages(make_path("tasks", task_id, "metrics"), MetricsPage)

    def progress(self, task_id: str, *, rounds: int = 10) -> TaskProgress:
        """Look at how a task's rounds go: those under way, those that ended last, and where the model is.

        Route: GET /v1/tasks/<task_id>/progress

        Args:
            task_id: the task's id.
            rounds: of how many of the rounds that ended last to tell, 0 to 50.

        Returns:
            How it stands, with the server's time, from which every other one in it is to be counted.

        Raises:
            RefusedError: 404: there is no such task for this token.
        """
        return self._connection.get(make_path("tasks", task_id, "progress"), TaskProgress, rounds=rounds)

    def watch(
        self,
        task_id: str,
        *,
        timeout: float | None = None,
        poll: float = 0.5,
        on_answer: Callable[[TaskProgress], None] | None = None,
    ) -> TaskProgress:
        """Watch a task's rounds until it has ended, with or without success.

        Calls: progress

        Args:
            task_id: the task's id.
            timeout: seconds after which this gives up; None: never.
            poll: seconds between two questions.
            on_answer: called with each answer, whether it is news or not; it tells of the 10 rounds that ended last.

        Returns:
            How the task stands at its end.

        Raises:
            ClientError: the time is over.
            UnreachableError, RefusedError: the server was away all the time that was left, without a `timeout` for ten
                minutes.
        """
        return wait_until_ended(
            lambda: self.progress(task_id),
            # Each answer differs from the one before, if only by the time.
            lambda now: object(),
            lambda now: (
                f"task {now.name!r} is {now.state}: {now.rounds_committed} of {now.rounds} rounds"
                + (f", {now.waiting_for or now.under_way}" if now.waiting_for or now.under_way else "")
            ),
            timeout=timeout,
            poll=poll,
            on_change=on_answer,
            on_outage=self._connection.on_outage,
        )

    def wait(
        self,
        task_id: str,
        *,
        timeout: float | None = None,
        poll: float = 0.5,
        on_change: Callable[[TaskInfo], None] | None = None,
    ) -> TaskInfo:
        """Wait until a task has ended, with or without success.

        Calls: get

        Args:
            task_id: the task's id.
            timeout: seconds after which this gives up; None: never.
            poll: seconds between two questions.
            on_change: called with the task at first, and then whenever it has changed, and when a phase of a round
                takes long.

        Returns:
            The task, which is completed, cancelled or failed.

        Raises:
            ClientError: the time is over.
            UnreachableError, RefusedError: the server was away all the time that was left, without a `timeout` for ten
                minutes.
        """
        return wait_until_ended(
            lambda: self.get(task_id),
            Progress(),
            lambda task: (
                f"task {task.name!r} is {task.state}: {task.rounds_committed} of {task.rounds} rounds, "
                + (task.waiting_for or f"{_few(task.waiting)} devices waiting, at least {task.min_cohort} needed")
            ),
            timeout=timeout,
            poll=poll,
            on_change=on_change,
            on_outage=self._connection.on_outage,
        )


class Progress:
    """The parts of a task whose change `wait` reports, asked again and again. Of the text that says what the task waits
    for, numbers do not count: they change whenever a device comes or goes. A phase of a round counts once it has been
    the same for SLOW_SECONDS, so that somebody who waits learns for whom."""

    def __init__(self) -> None:
        self._phase, self._since = "", 0.0

    def __call__(self, task: TaskInfo) -> object:
        phase, now = task.under_way.split(",")[0], time.monotonic()
        if phase != self._phase:
            self._phase, self._since = phase, now
        slow = phase if now - self._since >= SLOW_SECONDS else ""
        waits = re.sub(r"[0-9]+", "", task.waiting_for)
        return task.state, task.rounds_committed, task.failed_rounds, task.model, task.last_failure, waits, slow


def _few(count: int | None) -> str:
    return "too few" if count is None else str(count)
