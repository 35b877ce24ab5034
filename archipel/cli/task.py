"""`archipel task`: make tasks, watch them, stop them."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from archipel.cli.remote import as_json, fields, moment, read_request, remote, request_key, show, table
from archipel.errors import CommandError
from archipel.server import OperatorClient, TaskRequest
from archipel.server.resources import TaskInfo


@click.group()
def task() -> None:
    """Make, watch and stop the tasks of a federation server.

    \b
    export ARCHIPEL_SERVER=https://federation.example ARCHIPEL_TOKEN_FILE=~/.archipel-token
    archipel task create task.toml --bundle digits.bundle     --json prints its id for scripts
    archipel task list
    archipel task watch ID

    A task's file has the fields of its request:

    \b
    name = "digits"
    population = "pupils"
    rounds = 10
    min_cohort = 10
    cohort = 16
    eligibility = "ram >= 512MiB and charging"
    """


@task.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--bundle", type=click.Path(path_type=Path), help="A file to upload; else `bundle` in FILE is a digest.")
@request_key("task")
@as_json
@remote
def create(client: OperatorClient, file: Path, bundle: Path | None, key: str | None, as_json: bool) -> None:
    """Start what FILE (TOML) asks for."""
    # What is wrong with the file is said before anything is uploaded.
    request = read_request(file, TaskRequest, **({} if bundle is None else {"bundle": "0" * 64}))
    if bundle is not None:
        request = msgspec.structs.replace(request, bundle=client.upload_bundle(bundle).digest)
    made = client.create_task(request, key=key)
    show(made, as_json, _lines(made))


@task.command("list")
@as_json
@remote
def list_(client: OperatorClient, as_json: bool) -> None:
    """Every task, newest first."""
    found = list(client.tasks())
    rows = [
        (
            each.task_id, each.name, each.population, each.state, f"{each.rounds_committed}/{each.rounds}",
            str(each.waiting), moment(each.created),
        )
        for each in found
    ]  # fmt: skip
    show(found, as_json, table(("task", "name", "population", "state", "rounds", "waiting", "created"), rows))


@task.command("show")
@click.argument("task_id")
@as_json
@remote
def show_(client: OperatorClient, task_id: str, as_json: bool) -> None:
    """One task: what was asked for, and how far it is."""
    found = client.task(task_id)
    show(found, as_json, _lines(found))


@task.command()
@click.argument("task_id")
@click.option("--timeout", type=click.FloatRange(min=0), help="Give up after so many seconds.")
@remote
def watch(client: OperatorClient, task_id: str, timeout: float | None) -> None:
    """Say whenever something changes, until the task has ended; exit code 1 if it was not completed."""

    def changed(now: TaskInfo) -> None:
        failed = f", {now.failed_rounds} failed since" if now.failed_rounds else ""
        click.echo(f"{now.state}: {now.rounds_committed} of {now.rounds} rounds{failed}, {now.waiting} devices waiting")

    done = client.wait_task(task_id, timeout=timeout, on_change=changed)
    if done.state != "completed":
        raise CommandError(f"task {done.name!r} {done.state}: {done.reason}")


@task.command()
@click.argument("task_id")
@remote
def pause(client: OperatorClient, task_id: str) -> None:
    """Open no further rounds; the one under way is finished."""
    click.echo(client.pause(task_id).state)


@task.command()
@click.argument("task_id")
@remote
def resume(client: OperatorClient, task_id: str) -> None:
    """Open rounds again."""
    click.echo(client.resume(task_id).state)


@task.command()
@click.argument("task_id")
@remote
def cancel(client: OperatorClient, task_id: str) -> None:
    """Stop a task for good; the round under way is thrown away."""
    click.echo(client.cancel(task_id).state)


def _lines(found: TaskInfo) -> list[str]:
    return fields(found, times=("created", "ended"))
