"""`archipel task watch`: follow a task in the terminal until it ends."""

from __future__ import annotations

import re
import time

import click
import msgspec

from archipel.cli.federation.watch_lines import WatchLines, status
from archipel.cli.input_output.progress_line import progress_line
from archipel.cli.input_output.remote import remote
from archipel.cli.input_output.tables import one_line
from archipel.errors import CommandError
from archipel.operator import OperatorClient
from archipel.protocol.operator.progress import TaskProgress

POLL_SECONDS = 0.5


@click.command()
@click.argument("task_id")
@click.option("--timeout", type=click.FloatRange(min=0), help="Stop watching after this many seconds.")
@click.option("--json", "as_json", is_flag=True, help="Print how the task goes as JSON, one line per change.")
@remote
def watch(client: OperatorClient, task_id: str, timeout: float | None, as_json: bool) -> None:
    """Follow a task until it ends: its rounds, who is missing in them and why, what the sums say, where the model is.

    \b
    archipel task watch ID
    archipel task watch ID | tee rounds.log            plain lines, a few for each round
    archipel task watch ID --timeout 600
    archipel task watch ID --json | jq '.running[].phase'

    In a terminal the last line shows the phase of the present round, and how many devices have done what it asks for.

    The command waits for a server that does not answer, for ten minutes unless --timeout says otherwise, and for the
    evaluation of the last version, where the task has one. Ctrl-C ends the watching and leaves the task running. The
    exit code is 1 if the task was not completed.
    """
    ends = None if timeout is None else time.monotonic() + timeout
    lines, seen = WatchLines(), None

    try:
        with progress_line() as show:

            def answered(now: TaskProgress) -> None:
                nonlocal seen
                if as_json:
                    if (state := _state(now)) != seen:
                        click.echo(msgspec.json.encode(now))
                        seen = state
                    return
                for line in lines.news(now):
                    show("")
                    click.echo(line)
                show(one_line(status(now)))

            final = client.tasks.watch(task_id, timeout=timeout, poll=POLL_SECONDS, on_answer=answered)
            while _is_evaluated(final) and (ends is None or time.monotonic() < ends):
                time.sleep(POLL_SECONDS)
                final = client.tasks.progress(task_id)
                answered(final)
    except KeyboardInterrupt:
        click.echo(
            f"\nthe task goes on; `archipel task watch {task_id}` shows it again, `archipel task cancel {task_id}` "
            "stops it",
            err=True,
        )
        raise click.Abort from None
    if not as_json:
        for line in lines.end(final):
            click.echo(line)
    if final.state != "completed":
        raise CommandError(f"task {final.name!r} {final.state}: {final.reason}")


def _is_evaluated(now: TaskProgress) -> bool:
    """Whether the evaluation of a version still runs."""
    return any(each.evaluation_state == "running" for each in now.newest)


def _state(now: TaskProgress) -> object:
    """What of a task is news. Times and the numbers of devices that wait change all the time, and are none."""
    running = [
        (each.round_id, each.left, [(step.phase, step.answered) for step in each.phases if step.phase != "assigning"])
        for each in now.running
    ]
    ended = [(each.round_id, each.evaluation_state, len(each.metrics)) for each in now.newest]
    waits = re.sub(r"[0-9]+", "", now.waiting_for)
    return now.state, now.rounds_committed, now.failed_rounds, now.model, now.last_failure, waits, running, ended
