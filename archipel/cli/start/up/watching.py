"""Run the task of `archipel up` and show its rounds while they happen."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from archipel.cli.start.local.federation import LocalFederation
from archipel.cli.start.up.prepare import BUNDLE_FILE, POPULATION, Plan, cohort_minimum
from archipel.errors import CommandError
from archipel.operator import TaskRequest
from archipel.protocol.operator.registry import RoundMetrics
from archipel.protocol.operator.tasks import TaskInfo

POLL_SECONDS = 0.3


def start_task(federation: LocalFederation, plan: Plan, folder: Path, goal: int | None = None) -> TaskInfo:
    """Upload the bundle and create the task, or find the one that an earlier run of this plan has created.

    A round takes no more updates once `goal` of them are in; None: those of all devices.
    """
    bundle = federation.operator.bundles.upload(folder / BUNDLE_FILE, POPULATION)
    return federation.operator.tasks.create(
        TaskRequest(
            name="up",
            population=POPULATION,
            bundle=bundle.digest,
            rounds=plan.rounds,
            cohort=plan.devices,
            min_cohort=plan.min_cohort or cohort_minimum(plan.devices),
            goal=goal,
            evaluate_every=plan.evaluate_every or None,
        ),
        key=plan.key,
    )


def watch(federation: LocalFederation, task: TaskInfo, console: Console) -> list[RoundMetrics]:
    """Show the rounds until the task has ended; returns their metrics.

    Raises CommandError when a device or a process fails, or the task ends without having completed.
    """
    shown = 0
    with Live(console=console, auto_refresh=False, transient=False) as live:
        while True:
            federation.collect_events(timeout=POLL_SECONDS)
            info = federation.operator.tasks.get(task.task_id)
            rounds = list(federation.operator.tasks.metrics(task.task_id))
            if console.is_terminal:
                live.update(_table(rounds, info), refresh=True)
            else:
                # A line has the evaluation of its round, too, so it comes when that has ended.
                ready = list(takewhile(_evaluated, rounds))
                for each in ready[shown:]:
                    console.print(round_line(each, info.rounds), soft_wrap=True)
                shown = len(ready)
            if info.state in ("failed", "cancelled"):
                raise CommandError(f"the task ended early ({info.state}): {info.reason}")
            if info.state == "completed" and all(_evaluated(each) for each in rounds):
                return rounds


def _evaluated(each: RoundMetrics) -> bool:
    """Whether nothing is still to come for the round."""
    return each.evaluation is None or each.evaluation_state not in ("running", "proposed")


def round_line(each: RoundMetrics, rounds: int) -> str:
    """A round of `rounds` as one line."""
    metrics = [f"{name} {value:.4g}" for name, value in each.metrics.items()]
    seconds = f"{each.ended - each.started:.1f} s"
    return f"round {each.number} of {rounds}: {', '.join([f'{each.devices} devices', seconds, *metrics])}"


def _table(rounds: Sequence[RoundMetrics], info: TaskInfo) -> Table:
    names = list(dict.fromkeys(name for each in rounds for name in each.metrics))
    made = Table(title=f"{len(rounds)} of {info.rounds} rounds, {info.waiting_for or info.state}")
    for column in ("round", "devices", "seconds", *names):
        made.add_column(column, justify="right")
    for each in rounds[-20:]:
        values = (f"{each.metrics[name]:.4g}" if name in each.metrics else "" for name in names)
        made.add_row(str(each.number), str(each.devices), f"{each.ended - each.started:.1f}", *values)
    return made
