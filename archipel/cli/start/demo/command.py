"""`archipel demo`."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from archipel.bundle.foreign import recognize
from archipel.errors import CommandError

if TYPE_CHECKING:
    from archipel.cli.start.local.federation import LocalFederation

LEAST_DEVICES = 17
"""Two devices vanish in each round, a third of all may work with the server, and ten others hide each other."""
LEAST_DEVICES_OF_EDGE = 8
"""One device of an edge server vanishes, a third may work with it, and five others hide each other."""
LEAST_OWN_DEVICES = 6
"""Of an own model's trial: two vanish in each round, and more than half of all are in its sum."""


@click.command()
@click.option("--rounds", default=10, show_default=True, help="Rounds of federated averaging.")
@click.option("--devices", default=32, show_default=True, help="How many pupils are devices; at least 17.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("report.html"), show_default=True,
              help="File for the report, or a folder for report.html.")  # fmt: skip
@click.option("--seed", default=0, show_default=True, help="Seed of the split, the training and the drop-outs.")
@click.option("--edges", type=int, help="Have so many edge servers between the server and the devices; at least 2.")
@click.option("--model", type=click.Path(path_type=Path), help="Your own model, an ONNX file; with --data.")
@click.option("--data", type=click.Path(path_type=Path),
              help="Your own examples, an .npz or .csv as `archipel up` takes it; with --model.")  # fmt: skip
@click.option("--keep-running", is_flag=True, help="Keep the server running until Ctrl-C, and print its address.")
def demo(
    rounds: int,
    devices: int,
    output: Path,
    seed: int,
    edges: int | None,
    model: Path | None,
    data: Path | None,
    keep_running: bool,
) -> None:
    """Run a whole federation on this machine, on real handwriting, and write report.html.

    \b
    archipel demo
    archipel demo --rounds 4 --seed 1 --keep-running
    archipel demo --edges 3
    archipel demo --model mine.onnx --data mine.npz --devices 8

    The demo trains a small network on digits of census staff, quantizes, converts and signs it. It starts a server and
    several processes full of devices. The devices of high-school pupils enrol, train on their own digits and take part
    in rounds of secure aggregation; in each round two of them vanish. The report compares the cloud's model, the
    federated model and the pupils' own models on other pupils. The demo takes about two minutes and 2 GB of memory.

    With --edges the devices are at edge servers, each of which sends the sum of its own devices to the root in a round
    of secure aggregation among them. The report also compares bytes and time with the same devices at one server, and
    computes the last round again. It takes two minutes more.

    With --model and --data the devices train your model on your examples, and the report compares it before and after
    on a fifth of them that no device had. `archipel up` keeps what it made; the demo leaves the report only.
    """
    if rounds < 1:
        raise CommandError(f"--rounds: expected at least 1, got {rounds}")
    own = _own(model, data)
    least = LEAST_DEVICES if own is None else LEAST_OWN_DEVICES
    if devices < least:
        raise CommandError(f"--devices: expected at least {least}, for a large enough cohort, got {devices}")
    _check_edges(edges, devices, own=own is not None)
    if output.is_dir():
        output = output / "report.html"
    _check_writable(output)
    # These import PyTorch, which takes seconds; an error in the arguments comes without them.
    from archipel.cli.start.demo.own import print_own, run_own, write_own_report
    from archipel.cli.start.demo.report import print_results, write_report
    from archipel.cli.start.demo.story import Options, Story
    from archipel.cli.start.local.processes import Processes

    console = Console()
    # SystemExit unwinds the ExitStack, so that `kill` ends the other processes in order, as Ctrl-C does.
    signal.signal(signal.SIGTERM, _terminate)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="archipel-demo-")))
        processes = Processes(folder)
        stack.callback(processes.close)
        if own is not None:
            with _progress(console) as progress:
                found, federation = run_own(
                    *own, rounds=rounds, devices=devices, seed=seed, folder=folder, processes=processes,
                    progress=progress,
                )  # fmt: skip
            write_own_report(found, output)
            print_own(found, console)
            console.print(f"report: {output.absolute()}", soft_wrap=True)
            if keep_running:
                _keep_running(console, federation, folder)
            return
        with _progress(console) as progress:
            story = Story(Options(rounds, devices, seed, edges or 0), folder, processes, progress)
            results = story.run()
        write_report(results, output)
        print_results(results, console)
        console.print(f"report: {output.absolute()}", soft_wrap=True)
        if keep_running and story.federation is not None:
            _keep_running(console, story.federation, folder)


def _terminate(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _check_edges(edges: int | None, devices: int, *, own: bool) -> None:
    """Raise CommandError for edge servers that could have no round."""
    if edges is None:
        return
    if own:
        raise CommandError("--edges: for the demo's own model only; leave out --model and --data, or --edges")
    if edges < 2:
        raise CommandError(
            f"--edges: expected at least 2, got {edges}: the sum of a single one would not be hidden from the root; "
            "without --edges the devices are at the server itself"
        )
    least = edges * LEAST_DEVICES_OF_EDGE
    if devices < least:
        raise CommandError(
            f"--edges: {edges} edge servers need {least} devices, {LEAST_DEVICES_OF_EDGE} each for a large enough "
            f"cohort, got {devices}; give --devices {least}, or at most {devices // LEAST_DEVICES_OF_EDGE} edge servers"
        )


def _own(model: Path | None, data: Path | None) -> tuple[Path, Path] | None:
    """Model and data of the user's own, None without. Raises CommandError."""
    if model is None and data is None:
        return None
    if model is None or data is None:
        raise CommandError("--model and --data: give both, such as --model mine.onnx --data mine.npz")
    for path in (model, data):
        if not path.is_file():
            raise CommandError(f"{path}: {recognize(path) or 'no such file'}")
    return model, data


def _keep_running(console: Console, federation: LocalFederation, folder: Path) -> None:
    console.print(f"server: {federation.address}   operator token: {federation.token}", soft_wrap=True)
    console.print(f"dashboard: {federation.address}/dashboard/   (log in with the operator token)", soft_wrap=True)
    console.print(f"data:   {folder}   (removed at the end; Ctrl-C ends everything)", soft_wrap=True)
    try:
        while True:
            # Raises CommandError when one of the processes has ended.
            federation.collect_events(timeout=1.0)
    except KeyboardInterrupt:
        console.print("stopping")


def _check_writable(path: Path) -> None:
    """Raise CommandError, before minutes of work, if no file can be written into the report's folder."""
    try:
        handle, name = tempfile.mkstemp(dir=path.absolute().parent, prefix=".report-")
    except OSError as error:
        raise CommandError(f"--output: {path.absolute().parent}: cannot be written ({error.strerror})") from None
    os.close(handle)
    os.unlink(name)


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    columns = (
        SpinnerColumn(finished_text="✓"),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        yield progress
