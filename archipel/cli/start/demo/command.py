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

from archipel.errors import CommandError

if TYPE_CHECKING:
    from archipel.cli.start.demo.story import Story
    from archipel.cli.start.local.processes import Processes

LEAST_DEVICES = 17
"""Two devices vanish in each round, a third of all may work with the server, and ten others hide each other."""


@click.command()
@click.option("--rounds", default=10, show_default=True, help="Rounds of federated averaging.")
@click.option("--devices", default=32, show_default=True, help="How many pupils are devices; at least 17.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("report.html"), show_default=True,
              help="File for the report, or a folder for report.html.")  # fmt: skip
@click.option("--seed", default=0, show_default=True, help="Seed of the split, the training and the drop-outs.")
@click.option("--keep-running", is_flag=True, help="Keep the server running until Ctrl-C, and print its address.")
def demo(rounds: int, devices: int, output: Path, seed: int, keep_running: bool) -> None:
    """Run a whole federation on this machine, on real handwriting, and write report.html.

    \b
    archipel demo
    archipel demo --rounds 4 --seed 1 --keep-running

    The demo trains a small network on digits of census staff, quantizes, converts and signs it. It starts a server and
    several processes full of devices. The devices of high-school pupils enrol, train on their own digits and take part
    in rounds of secure aggregation; in each round two of them vanish. The report compares the cloud's model, the
    federated model and the pupils' own models on other pupils. The demo takes about two minutes and 2 GB of memory.
    """
    if rounds < 1:
        raise CommandError(f"--rounds: expected at least 1, got {rounds}")
    if devices < LEAST_DEVICES:
        raise CommandError(f"--devices: expected at least {LEAST_DEVICES}, for a large enough cohort, got {devices}")
    if output.is_dir():
        output = output / "report.html"
    _check_writable(output)
    # These import PyTorch, which takes seconds; an error in the arguments comes without them.
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
        with _progress(console) as progress:
            story = Story(Options(rounds, devices, seed), folder, processes, progress)
            results = story.run()
        write_report(results, output)
        print_results(results, console)
        console.print(f"report: {output.absolute()}", soft_wrap=True)
        if keep_running and story.federation is not None:
            _keep_running(console, story, processes)


def _terminate(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _keep_running(console: Console, story: Story, processes: Processes) -> None:
    federation = story.federation
    if federation is None:
        return
    console.print(f"server: {federation.address}   operator token: {federation.token}", soft_wrap=True)
    console.print(f"data:   {story.folder}   (removed at the end; Ctrl-C ends everything)", soft_wrap=True)
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
