"""What a device's owner sees and decides: status, pause, resume, erase."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from archipel.cli.devices.device_process import seconds
from archipel.cli.input_output.tables import as_json as json_option
from archipel.cli.input_output.tables import one_line, protection_rows, show, table
from archipel.client import erase as erase_folder
from archipel.client import pause as pause_folder
from archipel.client import paused
from archipel.client import resume as resume_folder
from archipel.client.conditions.conditions import Conditions
from archipel.client.memory.erasing import MARK
from archipel.client.memory.journal import KEPT_ROUNDS
from archipel.client.memory.privacy import DELTA
from archipel.client.memory.spending import Spent
from archipel.client.owner_view import (
    OwnerView,
    Privacy,
    TaskPrivacy,
    folder_bytes,
    is_running,
    look,
    read_record,
    read_rounds,
)
from archipel.client.settings import load_device_settings
from archipel.errors import ClientError, CommandError
from archipel.protocol.moments import moment

_DELTA = click.FloatRange(0.0, 1.0, min_open=True, max_open=True)
_PLACE = click.argument("place", metavar="FOLDER_OR_CONFIG", type=click.Path(path_type=Path))


@click.command()
@_PLACE
@click.option(
    "--last",
    type=click.IntRange(0, KEPT_ROUNDS),
    default=10,
    show_default=True,
    help="How many of the last rounds to show.",
)
@click.option(
    "--delta", type=_DELTA, default=DELTA, show_default=True, help="Delta of the epsilons of rounds with noise."
)
@json_option
def status(place: Path, last: int, delta: float, as_json: bool) -> None:
    """Show who the device is, whether it may work, and what it did, sent and spent.

    \b
    archipel device status device.toml

    FOLDER_OR_CONFIG is the device's folder, or its file of settings; with the settings the conditions are shown as
    well. An agent may be at work meanwhile. The command does not ask the server.
    """
    folder, conditions = _open_place(place)
    view = look(folder, conditions, last=last, delta=delta)
    show(view, as_json, _lines(view))


@click.command()
@_PLACE
@click.option(
    "--for", "duration", metavar="TIME", help="How long, such as 90s, 45m, 2h or 3d. Default: until `resume`."
)
def pause(place: Path, duration: str | None) -> None:
    """Pause the device: a running agent stops between two steps, and leaves a round if the pause takes long.

    \b
    archipel device pause device.toml --for 2h
    """
    folder, _ = _open_place(place)
    pause_folder(folder, None if duration is None else time.time() + seconds(duration))
    click.echo(paused(folder))


@click.command()
@_PLACE
def resume(place: Path) -> None:
    """End a pause: the agent works again when the conditions hold.

    \b
    archipel device resume device.toml
    """
    folder, _ = _open_place(place)
    click.echo("resumed" if resume_folder(folder) else "it was not paused")


@click.command()
@_PLACE
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def erase(place: Path, yes: bool) -> None:
    """Destroy the device's keys and everything that it learned and kept. Stop its agent first.

    \b
    archipel device erase device.toml

    Others keep what they have: updates that were summed, and the server's record of this device. The device can take
    part again only with a new token. A file of examples outside the folder stays.
    """
    folder, _ = _open_place(place)
    click.echo(f"{folder}: this destroys, for good:")
    for line in _erased_lines(folder):
        click.echo(f"  {line}")
    if not yes and not _confirm():
        raise CommandError("nothing was erased; --yes does it without asking")
    if is_running(folder):
        raise CommandError(f"{folder}: its agent is running; stop that first. Nothing was erased")
    # It takes the folder's lock: an agent that has started since then is an error, too.
    erase_folder(folder)
    click.echo("erased")


def _confirm() -> bool:
    try:
        return click.confirm("Erase?")
    except click.Abort:
        # Ctrl-C, or standard input has ended, as in a script.
        return False


def _open_place(place: Path) -> tuple[Path, Conditions | None]:
    """A device's folder, and its conditions where `place` is its file of settings."""
    if place.is_dir():
        # A mistyped folder is refused: pausing writes a file into it, and erasing removes some.
        if not any((place / name).exists() for name in ("device.key", "device.json", "rounds", "lock", MARK)):
            raise CommandError(f"{place}: not a device's folder; give that, or the device's file of settings")
        return place, None
    settings = load_device_settings(place)
    if not settings.config.folder.is_dir():
        raise CommandError(
            f"{settings.config.folder}: no such folder; `archipel device enroll {place} TOKEN_FILE` makes it"
        )
    return settings.config.folder, settings.prepare()[1]


def _erased_lines(folder: Path) -> Iterator[str]:
    try:
        record = read_record(folder)
        yield (
            "no enrolment"
            if record is None
            else f"device {record.device_id}, its keys, its place in {record.population!r}"
        )
        yield f"journal of {read_rounds(folder)[1].totals.rounds} rounds"
    except ClientError as error:
        # A damaged record or journal is named and can be erased all the same.
        yield f"device and journal ({error})"
    for name, what in (
        ("examples", "examples in the store"),
        ("state", "what the models learned for this device alone"),
        ("models", "models"),
        ("cache", "cache"),
    ):
        yield f"{what}: {folder_bytes(folder / name):,} bytes"


def _lines(view: OwnerView) -> Iterator[str]:
    rotated = f"  (key replaced {view.rotations} times)" if view.rotations else ""
    yield f"device      {view.device_id or '- (not enrolled)'}{rotated}"
    yield f"server      {view.server or '-'}"
    yield f"population  {view.population or '-'}"
    yield f"folder      {view.folder}"
    yield f"agent       {'not known' if view.running is None else 'running' if view.running else 'not running'}"
    yield f"paused      {view.paused or 'no'}"
    yield f"cache       {view.cache_bytes:,} bytes"
    yield f"examples    {view.example_bytes:,} bytes in the store"
    yield ""
    if view.conditions is None:
        yield "conditions  not known here: give the device's file of settings"
    elif not view.conditions:
        yield "conditions  none: it may work at any time"
    else:
        rows = [
            (
                each.name,
                "-" if each.value is None else _value_text(each.value),
                "yes" if each.holds else f"no: {each.why_not}",
            )
            for each in view.conditions
        ]
        yield from table(("condition", "now", "holds"), rows)
    if view.models:
        yield ""
        models = ((each.name, str(each.version or "-"), each.status, each.digest) for each in view.models)
        yield from table(("model", "version", "status", "bundle"), models)
    yield ""
    yield from table(("protection", "holds", ""), protection_rows(view.protections))
    yield ""
    if view.rounds:
        head = ("began", "task", "kind", "privacy", "examples", "sent", "received", "result", "reason")
        last = [
            (
                moment(each.started), each.task_id[:8], each.kind, each.privacy, str(each.examples), f"{each.sent:,}",
                f"{each.received:,}", each.result or f"open ({each.step})", one_line(each.reason),
            )
            for each in view.rounds
        ]  # fmt: skip
        yield from table(head, last)
    totals = view.totals
    if not totals.rounds:
        yield "rounds      none yet"
        return
    yield (
        f"rounds      {totals.rounds} since {moment(totals.since)}: {totals.took_part} took part, "
        f"{totals.dropped} dropped, {totals.refused} refused, {totals.open} open; {totals.sent:,} bytes sent, "
        f"{totals.received:,} received"
    )
    yield from _privacy(view.privacy)


def _privacy(privacy: Privacy) -> Iterator[str]:
    yield ""
    if not privacy.tasks:
        yield "privacy     nothing spent: no update was sent"
        return
    head = (
        "task", "model", "kind", "secure", "hidden among", "plain", "unsure", "sent", "noise", "epsilon",
        "server's noise",
    )  # fmt: skip
    yield from table(head, map(_privacy_row, privacy.tasks))
    yield "secure: the server saw the sum over so many devices. plain: it saw this device's update, or may have."
    yield "unsure: the masked update was sent, and is in a sum or lost."
    if privacy.epsilon is not None:
        yield (
            f"noise: in {privacy.noised} of {privacy.rounds} rounds, which are together differentially private for "
            f"each example with epsilon {privacy.epsilon:.3g} at most, at delta {privacy.delta:g}"
        )
    if any(each.spent.stated for each in privacy.tasks):
        yield (
            "server's noise: what the server's signed plans say that it adds to the sums, and what all versions of the "
            "model tell of this whole device up to the last of these rounds, whoever sees them; it is the server's "
            "word, which no device can check"
        )
    if privacy.noised < privacy.rounds:
        yield (
            f"no epsilon: {privacy.rounds - privacy.noised} rounds added no noise, or none of a strength that the "
            "bundle states; what hides an example there is the sum alone"
        )


def _privacy_row(task: TaskPrivacy) -> Sequence[str]:
    spent = task.spent
    return (
        spent.task_id[:8] or "(older)", spent.model or "-", spent.kind, str(spent.secure), _cohort_text(spent),
        str(spent.plain), str(spent.unsure), f"{spent.sent:,}", f"{spent.noised} of {spent.rounds}",
        "-" if task.epsilon is None else f"{task.epsilon:.3g}", _stated_text(spent),
    )  # fmt: skip


def _stated_text(spent: Spent) -> str:
    # Rows of many old tasks are of several models, and so of several accounts.
    if spent.last is None or not spent.task_id:
        return f"in {spent.stated} of {spent.rounds}" if spent.stated else "-"
    last = spent.last
    return f"{last.mechanism}, epsilon {last.epsilon:.3g} at {last.delta:g}, in {spent.stated} of {spent.rounds}"


def _cohort_text(spent: Spent) -> str:
    if not spent.told:
        return "not told" if spent.secure else "-"
    untold = f", {spent.secure - spent.told} not told" if spent.secure > spent.told else ""
    return f"{spent.smallest} at least, {spent.devices / spent.told:.3g} on average{untold}"


def _value_text(value: str | float | bool) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e5 else f"{value:.6g}"  # bytes are to be read
    return str(value)
