"""`archipel simulate`."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import click
import msgspec

from archipel.cli.input_output.distributions import describe_distribution
from archipel.cli.input_output.progress_line import progress_line
from archipel.cli.input_output.remote import remote_with
from archipel.cli.input_output.stopping import catch_ctrl_c
from archipel.cli.input_output.tables import as_json, show
from archipel.cli.input_output.targets import check_target
from archipel.errors import CommandError
from archipel.operator import OperatorClient
from archipel.operator.curves import check_plot_name

if TYPE_CHECKING:
    from archipel.simulation.federation import Federation
    from archipel.simulation.result import Result
    from archipel.simulation.rounds import RoundRow

SHOWN_ROWS = 25
"""About how many rows of rounds are printed."""


class _Command(click.Command):
    """Shows the example file as it is."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from archipel.simulation.federation_parts.example import EXAMPLE

        formatter.write_paragraph()
        formatter.write("A file with everything that is common:\n\n")
        formatter.write("".join(f"  {line}\n" if line else "\n" for line in EXAMPLE.split("\n")))


@click.command(cls=_Command)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE",
              help="In place of the file's: --set strategy.mu=0.1 --set partition.alpha=0.3")  # fmt: skip
@click.option("--rounds", type=click.IntRange(1), help="How many rounds in all, in place of the file's.")
@click.option("--workers", type=click.IntRange(0), help="How many processes, in place of the file's.")
@click.option("--engine", metavar="NAME", help="What runs the devices' programs: torch is PyTorch on the GPU, if there "
              "is one, torch:cuda:1 or torch:cpu another device.")  # fmt: skip
@click.option("--folder", type=click.Path(path_type=Path),
              help="Keep here how far the run is, in place of the file's run.folder.")  # fmt: skip
@click.option("--secure", is_flag=True, help="Really carry out secure aggregation: every device's keys, shares, masks.")
@click.option(
    "--plot", "plot_file", type=click.Path(path_type=Path), help="Draw the curves into this .png, .svg, .pdf."
)
@click.option("--parquet", type=click.Path(path_type=Path),
              help="Write a row for each round here, and for each device into NAME-clients.parquet.")  # fmt: skip
@click.option("--from-task", "task_id", metavar="ID", help="Do with these data what this task of a server does: its "
              "bundle, rounds, cohort, privacy, hyperparameters, aggregation, secure groups, protocol.")  # fmt: skip
@as_json
@remote_with("--from-task", "task_id")
def simulate(
    client: OperatorClient | None,
    file: Path,
    settings: tuple[str, ...],
    rounds: int | None,
    workers: int | None,
    engine: str | None,
    folder: Path | None,
    secure: bool,
    plot_file: Path | None,
    parquet: Path | None,
    task_id: str | None,
    as_json: bool,
) -> None:
    """Train the federation of FILE, a TOML file, on this machine: its devices, rounds and sums, without a server.

    \b
    archipel simulate federation.toml
    archipel simulate federation.toml --set strategy=scaffold --rounds 100 --workers 4
    archipel simulate federation.toml --plot curves.png --parquet rounds.parquet
    archipel simulate federation.toml --from-task ID --rounds 5

    The devices run the graphs that real devices run, and the server's half is that of real rounds, so the numbers are
    those of a federation with these data. `archipel new` writes such a file, with a model and data.

    With --from-task the file says what the data are and how they are divided; give the publisher's key as
    `--set 'model.key=["publisher.pub"]'`.

    Ctrl-C ends after the present round; with a folder the same command goes on from there, also after a kill.
    """
    if plot_file is not None:
        check_plot_name(plot_file)
    check_target(plot_file, "matplotlib", "curves")
    check_target(parquet, "pyarrow", "data")
    from archipel.simulation.federation import load_federation

    given = [
        *settings,
        *(f"{key}={value}" for key, value in (("rounds", rounds), ("run.workers", workers)) if value is not None),
    ]
    if secure:
        given.append("run.masks=true")
    if engine is not None:
        given.append(f"run.engine={msgspec.json.encode(engine).decode()}")
    if folder is not None:
        # As a text of TOML, since the folder's name may be anything.
        given.append(f"run.folder={msgspec.json.encode(str(folder.absolute())).decode()}")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="archipel-simulate-") as scratch:
        replaced = None
        if client is not None and task_id is not None:
            replaced = _task(client, task_id, load_federation(file, given), Path(scratch))
        federation = load_federation(file, given, replaced)
        result = _run(federation, file, as_json)
    # Before the files, for which the disk may have no room: what the run came to is then not lost.
    show(_Summary.of(result), as_json, _last_lines(result, federation, time.monotonic() - started))
    for path, write in ((plot_file, result.plot), (parquet, result.to_parquet)):
        if path is not None:
            write(path)
            if not as_json:
                click.echo(f"written to {path}")


def _task(client: OperatorClient, task_id: str, federation: Federation, folder: Path) -> dict[str, object]:
    """What is replaced in the file for a task of the server, whose bundle is written into the folder."""
    task = client.tasks.get(task_id)
    if task.kind != "training":
        raise CommandError(f"task {task.name!r} is of kind {task.kind}; only trainings are simulated")
    if task.mode == "asynchronous" and federation.settings.system is None:
        raise CommandError(
            f"task {task.name!r} is asynchronous, which needs a clock; give {federation.file} a [system]"
        )
    bundle = folder / "task.bundle"
    bundle.write_bytes(client.bundles.download(task.bundle))
    return federation.replaced_by(task, bundle)


class _Summary(msgspec.Struct, kw_only=True):
    """What --json prints."""

    rounds: list[RoundRow]
    tested: dict[str, float]
    engine: str
    hints: list[str]

    @classmethod
    def of(cls, result: Result) -> _Summary:
        return cls(rounds=result.history, tested=result.history[-1].tested, engine=result.engine, hints=result.hints)


def _run(federation: Federation, file: Path, quiet: bool) -> Result:
    prepared = federation.prepare()
    folder, total = federation.folder, federation.settings.rounds
    if not quiet:
        cohort = federation.settings.cohort or len(prepared.clients)
        click.echo(f"{file}: {len(prepared.clients)} devices, {cohort} a round, {total} rounds")
    hint = (
        "nothing was kept; with --folder DIR a run that was stopped can go on"
        if folder is None
        else f"how far it came is in {quote(str(folder))}; the same command goes on from there"
    )
    with catch_ctrl_c(hint) as check, progress_line() as tell:
        stopped = False
        follow = _follower(total, tell, quiet)

        def on_round(row: RoundRow) -> bool:
            nonlocal stopped
            follow(row)
            try:
                check()
            except KeyboardInterrupt:
                stopped = True  # the run ends after it has written how far it is
            return not stopped

        result = federation.run_prepared(prepared, on_round, None if quiet else _tell_hints)
        if stopped and len(result.history) < total:
            tell("")
            raise KeyboardInterrupt
    return result


def _tell_hints(result: Result) -> None:
    # Before the rounds: who sees that they are in vain need not wait for them.
    for hint in result.hints:
        click.echo(f"hint: {hint}")


def _follower(total: int, tell: Callable[[str], None], quiet: bool) -> Callable[[RoundRow], None]:
    """Prints a row of the table for some rounds, and says on the progress line how long the rest takes."""
    every, started, first = max(1, total // SHOWN_ROWS), time.monotonic(), 0
    names: list[str] | None = None

    def follow(row: RoundRow) -> None:
        nonlocal first, names
        first = first or row.number
        if not quiet and (row.number in (first, total) or row.number % every == 0 or row.failed):
            tell("")
            values = _values(row)
            if names is None and not row.failed:
                names = list(values)
                click.echo("  ".join([" round", "devices", *(name.rjust(8) for name in names), "seconds"]))
            cells = [
                f"{values[name]:>{max(len(name), 8)}.4f}" if name in values else " " * max(len(name), 8)
                for name in names or []
            ]
            failed = f"  {row.failed}" if row.failed else ""
            devices = f"{row.devices}/{row.drawn}" if row.devices < row.drawn else str(row.devices)
            click.echo("  ".join([f"{row.number:>6}", f"{devices:>7}", *cells, f"{row.seconds:>7.2f}"]) + failed)
        done = row.number - first + 1
        left = (time.monotonic() - started) / done * (total - row.number)
        if row.number < total:
            tell(f"round {row.number} of {total}, about {left:.0f} s left")

    return follow


def _values(row: RoundRow) -> dict[str, float]:
    clock = {"clock": row.time} if row.time else {}
    return {**clock, **row.metrics, **{f"test {name}": value for name, value in sorted(row.tested.items())}}


def _device_lines(result: Result) -> list[str]:
    """What the devices measured, each on its own examples, after the last round in which they did."""
    spread = next((row.spread for row in reversed(result.history) if row.spread), {})
    return [f"devices: {name} {describe_distribution(each)}" for name, each in sorted(spread.items())]


def _privacy_lines(result: Result, delta: float) -> list[str]:
    last = result.history[-1]
    lines = [f"ended early: {result.ended}"] if result.ended else []
    if last.epsilon is not None:
        lines.append(
            f"privacy: {last.releases} noisy sums cost epsilon {last.epsilon:.4g} for each device, at delta {delta:g}"
        )
    return lines


def _secure_lines(result: Result, federation: Federation) -> list[str]:
    if not federation.settings.run.masks:
        return []
    done = sum(not row.failed for row in result.history)
    return [f"secure: carried out in {done} of {len(result.history)} rounds; each sum was that of the bare updates"]


def _last_lines(result: Result, federation: Federation, seconds: float) -> list[str]:
    from archipel.simulation.evaluation import has_own_tensors

    tested = ", ".join(f"{name} {value:.4f}" for name, value in sorted(result.history[-1].tested.items()))
    rounds = sum(row.seconds for row in result.history)
    devices = _device_lines(result)
    if tested:
        devices.insert(0, f"test: {tested}")
        if has_own_tensors(result.bundle):
            devices.insert(
                1, "that is without what devices keep for themselves; [evaluation] measures each with its own"
            )
    return [
        *(devices or ["no test data: give data.test or data.hold_out to measure the model"]),
        *_privacy_lines(result, federation.settings.differential_privacy.delta),
        *_secure_lines(result, federation),
        f"ran {result.engine}",
        f"{len(result.history)} round{'s' * (len(result.history) != 1)} in {rounds:.1f} s, {seconds:.1f} s with "
        "reading, converting and measuring",
    ]
