"""Tells an MLflow server of tasks: a run for each, a step for each committed round, and the model at its end.

It reads the database after rounds were committed, so no round waits for MLflow. How far it has come is a tag of the
run, which MLflow stores after the metrics that it stands for. After a kill in between, and after a takeover by another
server's coordinator, the same metrics are sent again with the same times and steps, and MLflow keeps them once.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from sqlalchemy import and_, or_, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import aliased

from archipel.errors import ServerError
from archipel.protocol.operator.results import RoundResult
from archipel.server.database.tables import BundleRow, Round, Task
from archipel.server.processes.lease import Lease
from archipel.server.processes.mlflow_client import MlflowClient, MlflowError
from archipel.server.services import Services

log = logging.getLogger("archipel.mlflow")

EXPERIMENT = "archipel"
LOOK_SECONDS = 5.0
AWAY_SECONDS = 30.0
"""MLflow is asked again so long after it did not answer."""
BATCH = 20
SERVER_TAG, TASK_TAG, POSITION_TAG = "archipel.server", "archipel.task", "archipel.position"
BEGUN, ENDED = "begun", "ended"
"""The positions of a run that has nothing yet, and of one that is complete."""
_STATUS = {"completed": "FINISHED", "failed": "FAILED"}

Position = tuple[float, str]


class MlflowSink:
    """`step` sends what is new. Raises MlflowError, SQLAlchemyError, and OSError or ServerError of the file store."""

    def __init__(self, services: Services, client: MlflowClient) -> None:
        self._services, self._client = services, client
        self._server = services.settings.public_key.hex()
        self._experiment = ""
        self._runs: dict[str, dict[str, Any]] = {}
        self._positions: dict[str, str] = {}

    def forget(self) -> None:
        """Ask MLflow anew what it has: another server may have told it more."""
        self._experiment = ""

    def step(self) -> None:
        """Send all that MLflow does not have."""
        if not self._experiment:
            self._ask()
        with self._services.database.read() as session:
            # An evaluation of a training's round belongs to that training.
            tasks = list(session.scalars(select(Task).where(Task.evaluates.is_(None)).order_by(Task.created)))
        for task in tasks:
            if self._positions.get(task.task_id) != ENDED:
                self._tell(task)

    def _ask(self) -> None:
        experiment = self._client.experiment(EXPERIMENT)
        self._runs, self._positions = {}, {}
        for run in self._client.runs(experiment, SERVER_TAG, self._server):
            tags = {each["key"]: each["value"] for each in run["data"].get("tags", [])}
            task_id = tags.get(TASK_TAG, "")
            # Of two runs of one task, the answer about the first of which was lost, the older one counts.
            if task_id not in self._runs:
                self._runs[task_id], self._positions[task_id] = run, tags.get(POSITION_TAG, "")
        self._experiment = experiment

    def _tell(self, task: Task) -> None:
        if task.task_id not in self._runs:
            self._begin(task)
        run_id = str(self._runs[task.task_id]["info"]["run_id"])
        while rows := self._rounds(task.task_id, _read(self._positions[task.task_id])):
            metrics = [metric for row, evaluated in rows for metric in _metrics(row, evaluated)]
            last = rows[-1][0]
            position = f"{last.ended!r} {last.round_id}"
            self._client.log(run_id, metrics, {POSITION_TAG: position})
            self._positions[task.task_id] = position
        if task.ended is not None and not self._is_evaluated(task.task_id):
            self._end(task, run_id)

    def _begin(self, task: Task) -> None:
        with self._services.database.read() as session:
            model = session.get_one(BundleRow, task.bundle).name
        tags = {SERVER_TAG: self._server, TASK_TAG: task.task_id, POSITION_TAG: BEGUN}
        run = self._client.create_run(self._experiment, f"{model} {task.kind} {task.task_id[:8]}", tags, task.created)
        self._runs[task.task_id], self._positions[task.task_id] = run, BEGUN
        about = {"population": task.population, "model": model, "bundle": task.bundle, "kind": task.kind}
        about |= {"privacy": task.privacy, "mode": task.mode, "cohort": str(task.cohort)}
        self._client.log(run["info"]["run_id"], params=about)

    def _rounds(self, task_id: str, after: Position) -> list[tuple[Round, int | None]]:
        """The next committed rounds of the task and of its evaluations, these with the number of the round they are of.

        At most BATCH, the oldest first.
        """
        evaluation, evaluated = aliased(Task), aliased(Round)
        mine = (
            select(Round, evaluated.number)
            .outerjoin(evaluation, and_(evaluation.task_id == Round.task_id, evaluation.evaluates.is_not(None)))
            .outerjoin(evaluated, evaluated.round_id == evaluation.evaluates)
            .where(or_(Round.task_id == task_id, evaluated.task_id == task_id), Round.phase == "committed")
            # Of several groups of one round, one makes the version.
            .where(or_(Round.part_of.is_(None), Round.weights_out.is_not(None)))
            .where(or_(Round.ended > after[0], and_(Round.ended == after[0], Round.round_id > after[1])))
            .order_by(Round.ended, Round.round_id)
            .limit(BATCH)
        )
        with self._services.database.read() as session:
            return [(row, number) for row, number in session.execute(mine)]

    def _is_evaluated(self, task_id: str) -> bool:
        """Whether an evaluation of one of the task's rounds is not over yet."""
        waiting = select(Task.task_id).join(Round, Round.round_id == Task.evaluates)
        with self._services.database.read() as session:
            found = session.scalar(waiting.where(Round.task_id == task_id, Task.ended.is_(None)).limit(1))
        return found is not None

    def _end(self, task: Task, run_id: str) -> None:
        run = self._runs[task.task_id]
        if task.kind == "training" and task.model is not None and task.rounds_committed:
            with self._services.database.read() as session:
                model = session.get_one(BundleRow, task.bundle).name
            with self._services.blobs.open(task.model) as path:
                source = self._client.upload(run, "weights.safetensors", path)
            if source is None:
                log.warning("run %s: MLflow stores no files itself (--serve-artifacts), so it gets no model", run_id)
            else:
                self._client.register(model, run_id, source)
        self._client.end(run_id, _STATUS.get(task.state, "KILLED"), task.ended or 0.0)
        # Last: after a kill before this all of it is done again, to the same end.
        self._client.log(run_id, tags={POSITION_TAG: ENDED})
        self._positions[task.task_id] = ENDED


def _read(position: str) -> Position:
    ended, _, round_id = position.partition(" ")
    try:
        return float(ended), round_id
    except ValueError:
        return -math.inf, ""


def _metrics(row: Round, evaluated: int | None) -> Iterator[tuple[str, float, float, int]]:
    """Name, value, time and step of each figure of a round; `evaluated`: the number of the round that it evaluates."""
    when, step = row.ended or 0.0, row.number if evaluated is None else evaluated
    prefix = "" if evaluated is None else "evaluation "
    result = None if row.result is None else msgspec.convert(row.result, RoundResult)
    found: dict[str, float | None] = {} if result is None else {prefix + "devices": float(result.devices)}
    found |= {"weight_sum": row.weight_sum, "step_norm": row.step_norm}
    found |= {} if result is None else {prefix + name: value for name, value in result.metrics.items()}
    for name, value in found.items():
        if value is not None and math.isfinite(value):
            yield name, float(value), when, step


@contextmanager
def sinking(services: Services, lease: Lease) -> Iterator[None]:
    """Run the sink in a thread while the block lasts, whenever the lease is this coordinator's."""
    address = services.settings.mlflow_address
    if not address:
        yield
        return
    over = threading.Event()
    sink = MlflowSink(services, MlflowClient(address))

    def work() -> None:
        led, away, wait = False, False, LOOK_SECONDS
        while not over.wait(wait):
            leads, wait = lease.term is not None, LOOK_SECONDS
            if leads and not led:
                sink.forget()
            led = leads
            if not leads:
                continue
            try:
                sink.step()
                away = False
            except (MlflowError, SQLAlchemyError, ServerError, OSError) as error:
                if not away:
                    log.warning("waiting for MLflow: %s", str(getattr(error, "orig", None) or error).splitlines()[0])
                away, wait = True, AWAY_SECONDS
                sink.forget()

    thread = threading.Thread(target=work, daemon=True, name="mlflow")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(2.0)
