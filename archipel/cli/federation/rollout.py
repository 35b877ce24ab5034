"""`archipel rollout`: bring a version to more and more devices; watch, pause, resume or abort that."""

from __future__ import annotations

import re
from pathlib import Path

import click

from archipel.cli.input_output.remote import fields, read_request, remote, request_key
from archipel.cli.input_output.tables import as_json, show, table
from archipel.errors import CommandError
from archipel.operator import OperatorClient
from archipel.protocol.moments import moment
from archipel.protocol.operator.registry import RolloutInfo, RolloutRequest, StageEvaluation, StageInfo


@click.group()
def rollout() -> None:
    """Bring a version of a model to more and more devices, each stage with a health gate.

    \b
    archipel rollout create rollout.toml
    archipel rollout watch ID
    archipel rollout abort ID         back to the promoted version; as `archipel model rollback NAME`

    A rollout's file has the fields of its request; without a gate it says gate = "none":

    \b
    model = "digits"
    version = 2
    stages = [{percent = 5, soak_seconds = 3600}, {percent = 50, soak_seconds = 3600}]
    [gate]
    metric = "accuracy"
    range = 1.0
    better = "higher"
    max_loss = 0.01
    min_devices = 36
    max_devices = 50
    """


@rollout.command()
@click.argument("file", type=click.Path(path_type=Path))
@request_key("rollout")
@as_json
@remote
def create(client: OperatorClient, file: Path, key: str | None, as_json: bool) -> None:
    """Begin the rollout that FILE (TOML) describes.

    \b
    archipel rollout create rollout.toml
    """
    info = client.rollouts.create(read_request(file, RolloutRequest), key=key)
    show(info, as_json, _lines(info))


@rollout.command("list")
@click.option("--model", help="Only those of this model.")
@as_json
@remote
def list_(client: OperatorClient, model: str | None, as_json: bool) -> None:
    """List the rollouts, newest first.

    \b
    archipel rollout list
    archipel rollout list --model digits
    """
    infos = list(client.rollouts.list(model=model))
    rows = [
        (
            each.rollout_id, each.model, str(each.version), each.state, f"{each.stage}/{len(each.stages)}",
            f"{each.stages[each.stage - 1].percent:g} %", moment(each.created), each.reason,
        )
        for each in infos
    ]  # fmt: skip
    show(infos, as_json, table(("rollout", "model", "version", "state", "stage", "share", "began", "reason"), rows))


@rollout.command("show")
@click.argument("rollout_id")
@as_json
@remote
def show_(client: OperatorClient, rollout_id: str, as_json: bool) -> None:
    """Show one rollout with the results of each stage.

    \b
    archipel rollout show ID
    """
    info = client.rollouts.get(rollout_id)
    show(info, as_json, _lines(info))


@rollout.command()
@click.argument("rollout_id")
@click.option("--timeout", type=click.FloatRange(min=0), help="Stop watching after this many seconds.")
@remote
def watch(client: OperatorClient, rollout_id: str, timeout: float | None) -> None:
    """Print every change of a rollout until it ends. The exit code is 1 if it was not completed.

    \b
    archipel rollout watch ID --timeout 3600
    """
    told = ""

    def changed(now: RolloutInfo) -> None:
        nonlocal told
        # Called for changes of other fields, too, such as results of a stage.
        line = f"{now.state}: stage {now.stage} of {len(now.stages)}, {now.stages[now.stage - 1].percent:g} %"
        line += f"; {now.waiting_for}" if now.waiting_for else ""
        # Numbers change whenever a device comes or goes.
        if (fixed := re.sub(r"[0-9]+", "", line)) != told:
            click.echo(line)
        told = fixed

    final = client.rollouts.wait(rollout_id, timeout=timeout, on_change=changed)
    if final.state != "completed":
        raise CommandError(f"rollout of {final.model} version {final.version} {final.state}: {final.reason}")


@rollout.command()
@click.argument("rollout_id")
@remote
def pause(client: OperatorClient, rollout_id: str) -> None:
    """Keep a rollout in its present stage. After a week the server rolls it back.

    \b
    archipel rollout pause ID
    """
    click.echo(client.rollouts.pause(rollout_id).state)


@rollout.command()
@click.argument("rollout_id")
@remote
def resume(client: OperatorClient, rollout_id: str) -> None:
    """Continue a paused rollout.

    \b
    archipel rollout resume ID
    """
    click.echo(client.rollouts.resume(rollout_id).state)


@rollout.command()
@click.argument("rollout_id")
@remote
def abort(client: OperatorClient, rollout_id: str) -> None:
    """Roll back: the server offers the promoted version to all devices again.

    \b
    archipel rollout abort ID
    """
    click.echo(client.rollouts.abort(rollout_id).state)


def _lines(info: RolloutInfo) -> list[str]:
    rows = [
        (
            str(number), f"{each.percent:g} %", moment(each.started), _evaluation_text(each.candidate),
            _evaluation_text(each.baseline),
            _verdict(each),
        )
        for number, each in enumerate(info.stages, start=1)
    ]  # fmt: skip
    head = ("stage", "share", "began", f"version {info.version}", f"version {info.baseline}", "gate")
    return [*fields(info, times=("state_ends", "created", "ended"), without=("stages",)), "", *table(head, rows)]


def _evaluation_text(evaluation: StageEvaluation | None) -> str:
    if evaluation is None:
        return "-"
    if evaluation.value is None:
        return evaluation.state
    return f"{evaluation.value:.6g} ({evaluation.devices} devices, {evaluation.examples or 0:.0f} examples)"


def _verdict(stage: StageInfo) -> str:
    return "-" if stage.passed is None else "passed" if stage.passed else "failed"
