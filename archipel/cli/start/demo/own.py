"""The demo on one's own model and data: the rounds of `archipel up`, two devices vanish in each, and a report."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from archipel.bundle import generate_key
from archipel.cli.start.demo.fleet import VANISH_PER_ROUND, device_rows, round_row, vanish_plan
from archipel.cli.start.demo.plots import bytes_per_device, metric_curves, participation
from archipel.cli.start.demo.report import PACKAGE
from archipel.cli.start.demo.results import DeviceRow, RoundRow, count_committed
from archipel.cli.start.local.federation import LocalFederation
from archipel.cli.start.local.layout import Layout
from archipel.cli.start.local.processes import Processes
from archipel.cli.start.local.rounds import ended_rounds
from archipel.cli.start.up.command import RATES
from archipel.cli.start.up.prepare import Plan, fingerprint, prepare
from archipel.cli.start.up.running import WEIGHTS_FILE, held_out_metrics
from archipel.cli.start.up.watching import start_task
from archipel.compression.pages import write_page
from archipel.durable import write_durably
from archipel.operator.curves import curves

HOSTS = 4
HOLD_OUT = 0.2


@dataclass
class OwnResults:
    """What the report shows. `gains`: metric on the held-out examples, before and after."""

    model: str
    devices: int
    examples: int
    held_out: int = 0
    gains: dict[str, tuple[float, float]] = field(default_factory=dict)
    rounds: list[RoundRow] = field(default_factory=list)
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    fleet: list[DeviceRow] = field(default_factory=list)
    seconds: float = 0.0


def run_own(
    model: Path, data: Path, *, rounds: int, devices: int, seed: int, folder: Path, processes: Processes,
    progress: Progress,
) -> tuple[OwnResults, LocalFederation]:  # fmt: skip
    """Train `model` on `data`, split at random, and measure it on a fifth of the examples that no device has.

    Raises CommandError, the ArchipelError of a model that cannot be converted, OSError.
    """
    started = time.perf_counter()
    home = folder / "federation"
    bar = progress.add_task("convert, sign, split", total=None)
    plan = Plan(
        model=fingerprint(model), data=fingerprint(data), devices=devices, rounds=rounds, split="iid",
        strategy="fedavg", loss="", optimizer="sgd", lr=RATES["sgd"], epochs=2, batch_size=16, seed=seed,
        evaluate_every=0, hold_out=HOLD_OUT,
    )  # fmt: skip
    made = prepare(home, model, data, plan, generate_key())
    progress.update(bar, total=1, completed=1)
    results = OwnResults(model.name, devices, sum(made.sizes))
    bar = progress.add_task("start the server, enrol devices", total=devices)
    federation = LocalFederation(Layout(home), processes)
    federation.start_devices(HOSTS, vanish_plan(list(federation.devices), rounds, seed))
    federation.wait_until_enrolled(lambda done: progress.update(bar, completed=done))
    bar = progress.add_task("secure rounds", total=rounds)
    # A round ends as soon as all but the two that vanish have answered.
    task = start_task(federation, made.plan, home, goal=devices - VANISH_PER_ROUND).task_id
    seen = []
    for info in ended_rounds(federation, task):
        seen.append(info)
        results.rounds.append(round_row(federation, info))
        progress.update(bar, completed=count_committed(results.rounds))
    digest = federation.operator.tasks.get(task).model
    assert digest is not None
    write_durably(home / WEIGHTS_FILE, federation.operator.weights.download(digest), 0o644)
    results.curves = curves(list(federation.operator.tasks.metrics(task)))
    sizes = dict(zip(federation.devices, made.sizes, strict=True))
    results.fleet = device_rows(federation, sizes, seen)
    found = held_out_metrics(home)
    if found is not None:
        before, after = found
        results.held_out = after.count
        results.gains = {name: (value, after.values[name]) for name, value in before.values.items()}
    results.seconds = time.perf_counter() - started
    return results, federation


def write_own_report(results: OwnResults, path: Path) -> None:
    """Write the page, whole or not at all."""
    write_page(
        path,
        "own.html",
        PACKAGE,
        title=f"archipel demo: {results.model}",
        r=results,
        committed=count_committed(results.rounds),
        plots={
            "curves": metric_curves(results.curves),
            "participation": participation(results.fleet, results.rounds),
            "bytes": bytes_per_device(results.fleet),
        },
    )


def print_own(results: OwnResults, console: Console) -> None:
    """The figures that matter most, as a table."""
    gains = Table(title=f"{results.held_out} held-out examples")
    for column in ("metric", "before", "after"):
        gains.add_column(column, justify="left" if column == "metric" else "right")
    for name, (before, after) in results.gains.items():
        gains.add_row(name, f"{before:.4g}", f"{after:.4g}")
    if results.gains:
        console.print(gains)
    console.print(f"{len(results.rounds)} secure rounds of {results.devices} devices, {results.seconds:.0f} s in all")
