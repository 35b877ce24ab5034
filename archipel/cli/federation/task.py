"""`archipel task`: create tasks, watch and stop them, and read their results."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import get_args

import click
import msgspec

from archipel.cli.federation.round_lines import clipped_text, result_text
from archipel.cli.federation.task_lines import task_lines
from archipel.cli.federation.watch import watch
from archipel.cli.input_output.distributions import describe_distribution
from archipel.cli.input_output.remote import read_request, remote, request_key, save
from archipel.cli.input_output.tables import as_json, show, table
from archipel.errors import CommandError
from archipel.operator import OperatorClient, TaskRequest
from archipel.operator.curves import plot, write_csv, write_tensorboard
from archipel.protocol.messages import Kind
from archipel.protocol.moments import moment
from archipel.protocol.operator.registry import RoundMetrics
from archipel.protocol.operator.tasks import TaskState
from archipel.toml_files import read_toml


@click.group()
def task() -> None:
    """Start, watch and stop the tasks of a federation server.

    \b
    export ARCHIPEL_SERVER=https://federation.example ARCHIPEL_TOKEN_FILE=~/.archipel-token
    archipel task create task.toml --bundle digits.bundle     --json prints its id for scripts
    archipel task list
    archipel task watch ID
    archipel task metrics ID --plot curves.png
    archipel task download ID weights.safetensors

    ID is the task's id, or its first four or more digits.

    A task's file has the fields of its request:

    \b
    name = "digits"
    population = "pupils"
    rounds = 10
    min_cohort = 15
    cohort = 16
    eligibility = "ram >= 512MiB and charging"
    """


@task.command()
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option(
    "--from", "federation", type=click.Path(path_type=Path),
    help="In place of FILE: a federation.toml of `archipel simulate`, with what else a task needs in [task].",
)  # fmt: skip
@click.option(
    "--bundle",
    type=click.Path(path_type=Path),
    help="A bundle file to upload. Default: `bundle` in FILE is the digest of an uploaded one; that of a federation's "
    "model.",
)
@click.option("--aggregation", metavar="RULE", help="The rule by which updates become one, such as median; "
              "in place of the file's (docs/robust.md).")  # fmt: skip
@click.option("--tolerated", type=click.IntRange(0), help="How many updates the rule lets be arbitrary.")
@click.option("--secure-groups", type=click.IntRange(0), help="Over the sums of how many secure groups the rule goes.")
@click.option("--levels", type=click.IntRange(0), metavar="N", help="Train or evaluate over edge servers, of "
              "which N levels are between this server and the devices (docs/edge.md).")  # fmt: skip
@click.option("--mixing", help="What is done to updates before the rule: nnm or bucketing.")
@click.option("--root", metavar="DEVICE", help="For rule fltrust: the id of the device that you trust, with "
              "whose update the others are compared.")  # fmt: skip
@request_key("task")
@as_json
@remote
def create(
    client: OperatorClient,
    file: Path | None,
    federation: Path | None,
    bundle: Path | None,
    aggregation: str | None,
    tolerated: int | None,
    mixing: str | None,
    secure_groups: int | None,
    levels: int | None,
    root: str | None,
    key: str | None,
    as_json: bool,
) -> None:
    """Start the task that FILE (TOML) describes.

    \b
    archipel task create task.toml --bundle digits.bundle
    archipel task create --from federation.toml --bundle digits.bundle
    archipel task create task.toml --bundle digits.bundle --aggregation trimmed-mean --tolerated 2
    archipel task create task.toml --bundle digits.bundle --aggregation median --tolerated 1 --secure-groups 3
    archipel task create task.toml --bundle digits.bundle --aggregation fltrust --root DEVICE
    archipel task create task.toml --bundle digits.bundle --levels 1
    """
    given = {"rule": aggregation, "tolerated": tolerated, "mixing": mixing, "root": root}
    rule = {name: value for name, value in given.items() if value is not None}
    if (file is None) == (federation is None):
        raise CommandError("give FILE, a task's, or --from FEDERATION.toml, one of them")
    # The file is checked before the bundle is uploaded, with a digest of zeros in the place of the bundle's.
    if file is not None:
        request = _read_task(file, bundle, rule, secure_groups)
    else:
        assert federation is not None
        request, bundle = _read_federation(federation, bundle, rule, secure_groups)
    if levels is not None:
        request = msgspec.structs.replace(request, levels=levels)
    if bundle is not None:
        request = msgspec.structs.replace(request, bundle=client.bundles.upload(bundle, request.population).digest)
    info = client.tasks.create(request, key=key)
    show(info, as_json, task_lines(info, everything=False))


def _read_task(file: Path, bundle: Path | None, rule: Mapping[str, object], groups: int | None) -> TaskRequest:
    table = read_toml(file)
    if bundle is not None and "bundle" in table:
        raise CommandError(f"{file}: it names a bundle, and so does --bundle; leave one of them out")
    if bundle is None and "bundle" not in table:
        raise CommandError(
            f"{file}: no bundle; give --bundle FILE.bundle, or the digest of one as `bundle` in the file"
        )
    more: dict[str, object] = {} if bundle is None else {"bundle": "0" * 64}
    if groups is not None:
        more["secure_groups"] = groups
    if rule:
        said = table.get("aggregation")
        more["aggregation"] = {**(said if isinstance(said, dict) else {}), **rule}
    return read_request(file, TaskRequest, **more)


def _read_federation(
    file: Path, bundle: Path | None, rule: Mapping[str, object], groups: int | None
) -> tuple[TaskRequest, Path]:
    from archipel.simulation.federation import load_federation

    # A simulation of the file has examples of its own in the place of the device.
    settings = [f"{'task' if name == 'root' else 'aggregation'}.{name}={value}" for name, value in rule.items()]
    federation = load_federation(file, settings + ([] if groups is None else [f"secure_groups={groups}"]))
    request, model = federation.task_request("0" * 64), federation.settings.model
    named = None if model is None else model.bundle
    if bundle is None and named is None:
        raise CommandError(f"{file}: its model is no bundle; make one with `archipel convert`, and give it as --bundle")
    return request, bundle if bundle is not None else file.parent / str(named)


@task.command("list")
@click.option("--population", help="Only those of this population.")
@click.option("--state", type=click.Choice(get_args(TaskState)), help="Only those in this state.")
@click.option("--kind", type=click.Choice(get_args(Kind)), help="Only those of this kind.")
@click.option(
    "--since", type=click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H:%M"]), help="Only those created from then on (UTC)."
)
@as_json
@remote
def list_(
    client: OperatorClient,
    population: str | None,
    state: str | None,
    kind: str | None,
    since: datetime | None,
    as_json: bool,
) -> None:
    """List the tasks, newest first.

    \b
    archipel task list
    archipel task list --state running
    archipel task list --population phones --kind training --since 2026-11-01
    """
    begin = None if since is None else since.replace(tzinfo=UTC).timestamp()
    infos = list(client.tasks.list(population=population, state=state, kind=kind, since=begin))
    rows = [
        (
            each.task_id, each.name, each.population, each.state, f"{each.rounds_committed}/{each.rounds}",
            _count_text(each.waiting), moment(each.created),
        )
        for each in infos
    ]  # fmt: skip
    show(infos, as_json, table(("task", "name", "population", "state", "rounds", "waiting", "created"), rows))


@task.command("show")
@click.argument("task_id")
@click.option("--all", "everything", is_flag=True, help="Also settings that are as they are where nobody sets them.")
@as_json
@remote
def show_(client: OperatorClient, task_id: str, everything: bool, as_json: bool) -> None:
    """Show one task: how far it is and what it waits for, what it has made, and the settings that were chosen.

    \b
    archipel task show ID
    archipel task show ID --all         every setting

    Of a task with `distributions` it says how the metrics of its last evaluation are spread over devices.
    """
    info = client.tasks.get(task_id)
    lines = task_lines(info, everything=everything)
    if not as_json and info.distributions and info.rounds_committed:
        found = [each for each in client.tasks.metrics(task_id) if each.distributions]
        for name, spread in sorted(found[-1].distributions.items() if found else ()):
            lines.append(f"{name}, round {found[-1].number}: {describe_distribution(spread)}")
    show(info, as_json, lines)


task.add_command(watch)


@task.command()
@click.argument("task_id")
@click.option("--csv", "csv_file", type=click.Path(path_type=Path), help="Write the metrics into this CSV file.")
@click.option(
    "--plot", "plot_file", type=click.Path(path_type=Path), help="Draw the curves into this .png, .svg or .pdf."
)
@click.option(
    "--tensorboard", type=click.Path(path_type=Path), help="Write the curves into this folder, for TensorBoard."
)
@as_json
@remote
def metrics(
    client: OperatorClient,
    task_id: str,
    csv_file: Path | None,
    plot_file: Path | None,
    tensorboard: Path | None,
    as_json: bool,
) -> None:
    """List the results of the task's committed rounds, oldest first, and draw their curves.

    \b
    archipel task metrics ID
    archipel task metrics ID --plot curves.png
    archipel task metrics ID --csv rounds.csv --tensorboard runs/digits

    Of a training: `training ...` are means over the devices of what each measured while it trained, `evaluation ...`
    means of what the new version's `predict` answers (evaluate_every); `clipped` is how many devices had their update
    clipped. --plot and --tensorboard need the extra `curves`. They replace the file that they write.
    """
    infos = list(client.tasks.metrics(task_id))
    rows = [
        (
            str(each.number), each.round_id, str(each.devices), moment(each.ended),
            "-" if each.weight_sum is None else f"{each.weight_sum:.6g}", _step_text(each), clipped_text(each.result),
            _weights_text(each), result_text(each),
        )
        for each in infos
    ]  # fmt: skip
    head = ("number", "round", "devices", "ended", "weight", "step", "clipped", "weights", "result")
    show(infos, as_json, table(head, rows))
    # After the table, which a full disk then does not keep back.
    for path, write in ((csv_file, write_csv), (plot_file, plot), (tensorboard, write_tensorboard)):
        if path is not None:
            write(infos, path)
            if not as_json:
                click.echo(f"written to {path}")


def _weights_text(metrics: RoundMetrics) -> str:
    """Whether the server still has the weights that the round made."""
    if metrics.weights_deleted is not None:
        return f"deleted {moment(metrics.weights_deleted)}"
    return "-" if metrics.weights_out is None else "there"


def _step_text(metrics: RoundMetrics) -> str:
    """The norm of the server's step, and the factor by which it was scaled down."""
    if metrics.step_norm is None:
        return "-"
    scaled = metrics.step_scale is not None and metrics.step_scale < 1
    return f"{metrics.step_norm:.4g}" + (f" (scaled by {metrics.step_scale:.3g})" if scaled else "")


@task.command()
@click.argument("task_id")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--rounds", is_flag=True, help="Write the weights after each round into the folder FILE.")
@remote
def download(client: OperatorClient, task_id: str, file: Path, rounds: bool) -> None:
    """Write the training's newest weights into FILE, a new file (safetensors).

    \b
    archipel task download ID weights.safetensors
    archipel task download ID versions --rounds

    With --rounds FILE is a folder, which gets round-1.safetensors and so on; those that it has already stay, and so
    the same command fetches what is new. `archipel insight BUNDLE --weights versions` shows them.
    """
    info = client.tasks.get(task_id)
    if info.kind != "training":
        raise CommandError(
            f"task {info.name!r} is of kind {info.kind} and makes no weights; "
            f"`archipel task metrics {info.task_id}` shows its results"
        )
    if info.model is None:
        raise CommandError(f"task {info.name!r} has no weights yet: no round was opened")
    if rounds:
        _download_rounds(client, task_id, file)
        return
    digest = info.model
    save(file, lambda: client.weights.download(digest), digest)


def _download_rounds(client: OperatorClient, task_id: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    deleted = 0
    for each in client.tasks.metrics(task_id):
        digest, path = each.weights_out, folder / f"round-{each.number}.safetensors"
        if digest is None or path.exists():
            continue
        if each.weights_deleted is not None:
            deleted += 1
            continue
        save(path, partial(client.weights.download, digest), digest)
    if deleted:
        click.echo(f"the server has deleted the weights of {deleted} rounds", err=True)


@task.command()
@click.argument("task_id")
@remote
def pause(client: OperatorClient, task_id: str) -> None:
    """Pause a task: the round under way is finished, and no other one begins.

    \b
    archipel task pause ID
    """
    click.echo(client.tasks.pause(task_id).state)


@task.command()
@click.argument("task_id")
@remote
def resume(client: OperatorClient, task_id: str) -> None:
    """Resume a paused task: the server opens rounds again.

    \b
    archipel task resume ID
    """
    click.echo(client.tasks.resume(task_id).state)


@task.command()
@click.argument("task_id")
@remote
def approve(client: OperatorClient, task_id: str) -> None:
    """Approve an evaluation or analysis that somebody else proposed, so that it runs.

    \b
    archipel task approve ID
    """
    click.echo(client.tasks.approve(task_id).state)


@task.command()
@click.argument("task_id")
@remote
def cancel(client: OperatorClient, task_id: str) -> None:
    """Stop a task for good, and a training's evaluation with it, and discard the round under way.

    \b
    archipel task cancel ID
    """
    click.echo(client.tasks.cancel(task_id).state)


def _count_text(count: int | None) -> str:
    """A count as tables show it: "few" for one that the server does not tell, as it does with small ones."""
    return "few" if count is None else str(count)
