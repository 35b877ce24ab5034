"""`archipel model`: register versions of models, promote one for all devices, and roll back."""

from __future__ import annotations

import time
from pathlib import Path

import click

from archipel.bundle import format_card
from archipel.cli.federation.version_card import make_card
from archipel.cli.input_output.card import card_option, read_card
from archipel.cli.input_output.distributions import worst_tenths
from archipel.cli.input_output.remote import fields, metrics_line, remote, save
from archipel.cli.input_output.tables import as_json, show, table
from archipel.errors import CommandError
from archipel.operator import OperatorClient
from archipel.protocol.moments import moment
from archipel.protocol.operator.registry import ModelInfo, VersionDetail, VersionInfo, VersionRequest
from archipel.server.registry.expiry import has_expired

DIGITS = frozenset("0123456789abcdef")


@click.group()
def model() -> None:
    """Register versions of models on a server, promote them for all devices, and roll back.

    Networks to begin with are in `archipel models`, which needs no server.

    \b
    archipel model create digits --population pupils
    archipel model register digits --bundle digits.bundle
    archipel model register digits --task ID         the newest version that a training task made
    archipel model promote digits 2
    archipel model download digits 2 weights.safetensors
    archipel model rollback digits                   undo the rollout under way, else the last promotion
    """


@model.command()
@click.argument("name")
@click.option("--population", required=True, help="The population whose devices run the model.")
@as_json
@remote
def create(client: OperatorClient, name: str, population: str, as_json: bool) -> None:
    """Create the model NAME for a population, or show it if it exists already.

    \b
    archipel model create digits --population pupils
    """
    info = client.models.create(name, population)
    show(info, as_json, _model(info))


@model.command("list")
@as_json
@remote
def list_(client: OperatorClient, as_json: bool) -> None:
    """List every model, by name.

    \b
    archipel model list
    """
    infos = list(client.models.list())
    rows = [
        (each.name, each.population, _or_dash(each.promoted), _or_dash(each.newest), _or_dash(each.rollout_id))
        for each in infos
    ]
    withheld = [f"{each.name}: {each.not_offered}" for each in infos if each.not_offered]
    show(infos, as_json, [*table(("model", "population", "promoted", "newest", "rollout"), rows), *withheld])


@model.command("show")
@click.argument("name")
@as_json
@remote
def show_(client: OperatorClient, name: str, as_json: bool) -> None:
    """Show one model: which version is promoted, and whether a rollout is under way.

    \b
    archipel model show digits
    """
    info = client.models.get(name)
    show(info, as_json, _model(info))


@model.command()
@click.argument("name")
@click.option("--bundle", help="A .bundle file to upload, or the digest of one that the server has.")
@click.option("--task", "task_id", help="A training task whose result to register.")
@click.option("--number", type=click.IntRange(min=0), help="Which of the task's versions; the newest by default.")
@click.option("--parent", type=click.IntRange(min=1), help="The version it was made from, if its lineage does not say.")
@as_json
@remote
def register(
    client: OperatorClient,
    name: str,
    bundle: str | None,
    task_id: str | None,
    number: int | None,
    parent: int | None,
    as_json: bool,
) -> None:
    """Register a bundle, or the result of a training task, as a version. The same content is the same version.

    \b
    archipel model register digits --bundle digits.bundle
    archipel model register digits --task ID
    """
    if (bundle is None) == (task_id is None):
        raise CommandError("register: give either --bundle or --task")
    # 64 hexadecimal digits are a digest; everything else is a file to upload.
    if bundle is not None and not (len(bundle) == 64 and DIGITS.issuperset(bundle)):
        bundle = client.bundles.upload(Path(bundle), client.models.get(name).population).digest
    request = VersionRequest(bundle=bundle, task_id=task_id, task_version=number, parent=parent)
    info = client.models.register(name, request)
    show(info, as_json, _version(info))


@model.command()
@click.argument("name")
@as_json
@remote
def versions(client: OperatorClient, name: str, as_json: bool) -> None:
    """List a model's versions, newest first: where they came from, how many devices fetched them last, until when the
    server offers them ("-": without end), and whether it still has their weights.

    \b
    archipel model versions digits
    """
    infos = list(client.models.versions(name))
    rows = [
        (
            str(each.number), each.state, each.digest[:12], _or_dash(each.parent), _origin(each),
            "few" if each.downloaded is None else str(each.downloaded),
            moment(each.created), _expires(each), _kept(each), each.reason,
        )
        for each in infos
    ]  # fmt: skip
    head = ("version", "state", "digest", "parent", "from", "downloaded", "registered", "expires", "weights", "reason")
    show(infos, as_json, table(head, rows))


@model.command()
@click.argument("name")
@click.argument("number", type=click.IntRange(min=1))
@as_json
@remote
def version(client: OperatorClient, name: str, number: int, as_json: bool) -> None:
    """Show one version: its content, its lineage, and the results of devices that evaluated it.

    \b
    archipel model version digits 2
    """
    info = client.models.version(name, number)
    show(info, as_json, [*_version(info), *_evaluations(info)])


@model.command()
@click.argument("name")
@click.argument("number", type=click.IntRange(min=1))
@click.argument("file", type=click.Path(path_type=Path))
@remote
def download(client: OperatorClient, name: str, number: int, file: Path) -> None:
    """Write a version into FILE, a new file: its weights (safetensors), or the bundle if the version is a bundle as
    published.

    \b
    archipel model download digits 2 weights.safetensors
    """
    info = client.models.version(name, number)
    weights = info.weights
    # A version without weights of its own is a bundle as published, whose digest is not that of its file.
    if weights is None:
        save(file, lambda: client.bundles.download(info.bundle))
    else:
        save(file, lambda: client.weights.download(weights), weights)


@model.command()
@click.argument("name")
@click.argument("number", type=click.IntRange(min=1))
@click.argument("file", type=click.Path(path_type=Path))
@card_option
@remote
def card(client: OperatorClient, name: str, number: int, file: Path, card_file: Path | None) -> None:
    """Write a model card that says what a version's training tells about devices into FILE, a new file in TOML.

    \b
    archipel model card digits 2 digits-2.toml --card digits.toml
    archipel convert trained.onnx -o digits.bundle --key publisher --card digits-2.toml

    It has the server's account of differential privacy, epsilon and what that rests on, marked as the server's word.
    """
    text = format_card(make_card(client.models.version(name, number), read_card(card_file)))
    save(file, text.encode)


@model.command()
@click.argument("name")
@click.argument("number", type=click.IntRange(min=1))
@as_json
@remote
def promote(client: OperatorClient, name: str, number: int, as_json: bool) -> None:
    """Make a version the one for all devices, at once.

    \b
    archipel model promote digits 2
    """
    info = client.models.promote(name, number)
    show(info, as_json, _promoted(info))


@model.command()
@click.argument("name")
@click.option("--versions", type=click.IntRange(0), help="Keep those of so many newest versions; 0: of all.")
@click.option("--days", type=click.FloatRange(0), help="Keep those of so many last days.")
@as_json
@remote
def keep(client: OperatorClient, name: str, versions: int | None, days: float | None, as_json: bool) -> None:
    """Set which versions' weights the server keeps; what is left out is as the server's settings say.

    \b
    archipel model keep digits --versions 20 --days 90
    archipel model keep digits --versions 0            all of them
    archipel model keep digits                         as the server's settings say

    The server deletes nothing that is in use: what is promoted, what a rollback can go back to, and what rollouts and
    tasks work with.
    """
    info = client.models.keep(name, versions=versions, days=days)
    show(info, as_json, _model(info))


@model.command()
@click.argument("name")
@as_json
@remote
def rollback(client: OperatorClient, name: str, as_json: bool) -> None:
    """Undo the rollout under way, or else the last promotion.

    \b
    archipel model rollback digits
    """
    info = client.models.roll_back(name)
    show(info, as_json, _promoted(info))


@model.command()
@click.argument("name")
@as_json
@remote
def history(client: OperatorClient, name: str, as_json: bool) -> None:
    """List which version was for all devices and since when, newest first.

    \b
    archipel model history digits
    """
    infos = list(client.models.promotions(name))
    rows = [
        (str(each.number), str(each.version), each.how, each.actor, moment(each.created), _or_dash(each.rollout_id))
        for each in infos
    ]
    show(infos, as_json, table(("number", "version", "by", "who", "since", "rollout"), rows))


@model.command()
@click.argument("name")
@click.argument("number", type=click.IntRange(min=1))
@click.option("--reason", required=True, help="What is wrong with the version.")
@remote
def reject(client: OperatorClient, name: str, number: int, reason: str) -> None:
    """Reject a version: nobody can promote it until it is restored.

    \b
    archipel model reject digits 3 --reason "worse on old phones"
    """
    click.echo(client.models.reject(name, number, reason).state)


@model.command()
@click.argument("name")
@click.argument("number", type=click.IntRange(min=1))
@remote
def restore(client: OperatorClient, name: str, number: int) -> None:
    """Undo the rejection of a version.

    \b
    archipel model restore digits 3
    """
    click.echo(client.models.restore(name, number).state)


def _promoted(info: ModelInfo) -> list[str]:
    return [
        f"model {info.name}: version {info.promoted} is promoted",
        *([info.not_offered] if info.not_offered else []),
    ]


def _model(info: ModelInfo) -> list[str]:
    return fields(info, times=("created",))


def _version(info: VersionInfo) -> list[str]:
    # 0 is no time: the version does not expire.
    without = ["evaluations", *([] if info.not_after else ["not_after"])]
    without += [] if info.weights_deleted else ["weights_deleted", "deleted_why"]
    times = [name for name in ("created", "not_after", "weights_deleted") if name not in without]
    return fields(info, times=tuple(times), without=tuple(without))


def _evaluations(info: VersionDetail) -> list[str]:
    if not info.evaluations:
        return []
    rows = [
        (
            each.task_id, str(each.devices), f"{each.examples:.0f}", moment(each.ended),
            metrics_line({**dict(sorted(each.metrics.items())), **worst_tenths(each.distributions)}, each.clamped),
        )
        for each in info.evaluations
    ]  # fmt: skip
    return ["", *table(("evaluated by task", "devices", "examples", "ended", "metrics"), rows)]


def _origin(version: VersionInfo) -> str:
    if version.task_id is None:
        return "bundle"
    return f"task {version.task_id[:8]} version {version.task_version}, {version.cohort} devices"


def _expires(version: VersionInfo) -> str:
    if has_expired(version.not_after, time.time()):
        return f"expired {moment(version.not_after)}"
    return moment(version.not_after or None)


def _kept(version: VersionInfo) -> str:
    return "there" if version.weights_deleted is None else f"deleted {moment(version.weights_deleted)}"


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)
