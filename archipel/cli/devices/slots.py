"""`archipel slots`: the two model slots of a device."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from archipel.bundle import load_public_key, open_bundle
from archipel.cli.devices.variant_limits import VariantLimits, variant_limits
from archipel.cli.input_output.publisher_keys import allow_development, offer_option, required_keys
from archipel.errors import ArchipelError, CommandError
from archipel.lite_runtime.learned import BUNDLE_FOLDER, LEARNED_FILE
from archipel.lite_runtime.slots.folder import SlotFolder, SlotName
from archipel.lite_runtime.slots.model_slots import Slots

_FOLDER = click.argument("folder", type=click.Path(path_type=Path))
_THREADS = click.option("--threads", default=1, show_default=True, help="Threads that run one operator together.")


@click.group()
def slots() -> None:
    """Keep two models on a device: one that runs, and one to try next or to return to.

    \b
    archipel slots install FOLDER new.bundle --key publisher.pub    verify it, put it into the free slot
    archipel slots switch FOLDER --key publisher.pub                test it, make it active, on trial
    archipel slots confirm FOLDER                                   it works: keep it
    archipel slots rollback FOLDER --key publisher.pub              it does not: back to the last good one

    A device's program that uses `lite.Slots` gives up a model on trial by itself when it crashes or gives numbers that
    are not finite. One process owns a folder at a time: while that program runs, it has to make the changes.
    """


@slots.command()
@_FOLDER
@click.option(
    "--key",
    "key_files",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Verify the bundles with this public key.",
)
def show(folder: Path, key_files: tuple[Path, ...]) -> None:
    """Show both slots: status, model, digest, whether something was learned, and why a slot is bad.

    \b
    archipel slots show FOLDER --key publisher.pub

    With --key the command also verifies signatures and digests; the exit code is 1 if a slot in use is damaged.
    """
    if not folder.is_dir():
        raise CommandError(f"{folder}: no such folder; `archipel slots install` makes one")
    keys = [load_public_key(file) for file in key_files]
    names: tuple[SlotName, ...] = ("a", "b")
    damaged: list[str] = []
    with SlotFolder(folder) as owned:
        for name in names:
            slot = owned.state.slot(name)
            mark = "*" if owned.state.active == name else " "
            if slot.status == "empty":
                click.echo(f"{mark} {name}  empty")
                continue
            learned = ", has learned" if (owned.path(name) / LEARNED_FILE).exists() else ""
            attempts = f", {slot.attempts} starts left" if slot.status in ("staged", "trying") else ""
            click.echo(f"{mark} {name}  {slot.status:<7} {slot.name!r}, digest {slot.digest}{learned}{attempts}")
            if slot.reason:
                click.echo(f"     {slot.reason}")
            if keys and slot.status != "bad":
                try:
                    path = owned.path(name) / BUNDLE_FOLDER
                    # Shown, not run: whether to use a development key is asked where a bundle is used.
                    digest = open_bundle(path, keys, allow_development=True).digest
                    if digest != slot.digest:
                        damaged.append(f"slot {name} holds bundle {digest}")
                except ArchipelError as error:
                    damaged.append(f"slot {name}: {error}")
    if damaged:
        raise CommandError("; ".join(damaged))


@slots.command()
@_FOLDER
@click.argument("bundle", type=click.Path(path_type=Path))
@required_keys
@allow_development
@click.option(
    "--memory-limit", type=int, help="Refuse a bundle whose manifest says that it needs more bytes of memory."
)
@variant_limits
def install(
    folder: Path,
    bundle: Path,
    key_files: tuple[Path, ...],
    allow_development: bool,
    memory_limit: int | None,
    limits: VariantLimits,
) -> None:
    """Verify BUNDLE (folder or .bundle file) and copy it into the slot of FOLDER that is not in use.

    \b
    archipel slots install FOLDER new.bundle --key publisher.pub
    archipel slots install FOLDER digits --key publisher.pub --max-bytes 200000

    Of a release, the folder of `archipel convert --variants`, it takes the best variant within the limits, and says
    which and why. Nothing else changes: `archipel slots switch` makes the new model the active one.
    """
    with (
        offer_option(),
        tempfile.TemporaryDirectory() as cache,
        _open(folder, key_files, allow_development=allow_development, memory_limit=memory_limit) as opened,
    ):
        choice = limits.choose(bundle, key_files, Path(cache), allow_development=allow_development)
        if choice is not None:
            click.echo(str(choice))
        name = opened.install(bundle if choice is None else choice.bundle.folder)
        slot = opened.state.slot(name)
        click.echo(f"slot {name}: staged {slot.name!r}, digest {slot.digest}")


@slots.command()
@_FOLDER
@required_keys
@allow_development
@_THREADS
def switch(folder: Path, key_files: tuple[Path, ...], allow_development: bool, threads: int) -> None:
    """Load the installed model, run its self-test, and make it the active one, on trial.

    \b
    archipel slots switch FOLDER --key publisher.pub

    If it fails, the active model stays and the exit code is 1.
    """
    with offer_option(), _open(folder, key_files, allow_development=allow_development, threads=threads) as opened:
        report = opened.switch()
        active = opened.state.active
        click.echo(f"slot {active or '-'}: active, on trial; self-test: {report}")


@slots.command()
@_FOLDER
def confirm(folder: Path) -> None:
    """End the trial of the active model: it is good, and the next install may overwrite the other slot.

    \b
    archipel slots confirm FOLDER
    """
    with _open(folder, ()) as opened:
        opened.confirm()
        click.echo(f"slot {opened.state.active}: good")


@slots.command()
@_FOLDER
@required_keys
@allow_development
@click.option(
    "--reason",
    default="rolled back by hand",
    show_default=True,
    help="A reason to record with the slot that is given up.",
)
def rollback(folder: Path, key_files: tuple[Path, ...], allow_development: bool, reason: str) -> None:
    """Make the last good model active again, and mark the present one as bad.

    \b
    archipel slots rollback FOLDER --key publisher.pub --reason "slow"
    """
    with offer_option(), _open(folder, key_files, allow_development=allow_development) as opened:
        name = opened.rollback(reason)
        click.echo(f"slot {name}: active again")


def _open(
    folder: Path,
    key_files: tuple[Path, ...],
    *,
    allow_development: bool = False,
    threads: int = 1,
    memory_limit: int | None = None,
) -> Slots:
    keys = [load_public_key(file) for file in key_files]
    # load=False: a model on trial has a counted number of starts, and those are for the program that serves it.
    return Slots(
        folder, keys, threads=threads, memory_limit=memory_limit, load=False, allow_development=allow_development
    )
