"""Run the federation in a folder to its end, and write and tell what came out of it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from shlex import quote

from rich.console import Console

from archipel.bundle import is_development_key, load_public_key, read_weights
from archipel.cli.input_output.arrays import read_arrays
from archipel.cli.start.local.federation import LocalFederation
from archipel.cli.start.local.layout import Layout
from archipel.cli.start.local.processes import Processes
from archipel.cli.start.up.prepare import BUNDLE_FILE, HELD_OUT_FILE, Plan
from archipel.cli.start.up.watching import start_task, watch
from archipel.errors import CommandError
from archipel.lite_runtime import load
from archipel.operator.curves import curves, plot, write_csv
from archipel.protocol.metrics.measures import Measured, measured
from archipel.protocol.operator.registry import RoundMetrics
from archipel.protocol.uploads import upload_program

HOSTS = 4
WEIGHTS_FILE = "weights.safetensors"


def run(
    folder: Path, plan: Plan, stack: ExitStack, console: Console
) -> tuple[LocalFederation, list[RoundMetrics], bytes]:
    """Start server and devices, watch the task, and fetch the weights; `stack` ends the processes.

    Raises CommandError that says what failed; the same call goes on later.
    """
    layout = Layout(folder)
    processes = Processes(layout.logs)
    stack.callback(processes.close)
    with console.status("starting the server"):
        federation = LocalFederation(layout, processes)
    with console.status("enrolling the devices") as status:
        federation.start_devices(min(HOSTS, max(2, os.cpu_count() or 2)))
        federation.wait_until_enrolled(lambda done: status.update(f"enrolling the devices: {done} of {plan.devices}"))
    console.print(
        f"dashboard: {federation.address}/dashboard/   (log in with the token in {layout.operator_token})",
        soft_wrap=True, highlight=False,
    )  # fmt: skip
    task = start_task(federation, plan, folder)
    metrics = watch(federation, task, console)
    task = federation.operator.tasks.get(task.task_id)
    if task.model is None:
        raise CommandError(f"task {task.task_id}: has no weights, although it has completed")
    return federation, metrics, federation.operator.weights.download(task.model)


def stay(federation: LocalFederation, console: Console) -> None:
    """Let server and devices go on until Ctrl-C, and tell why devices refuse rounds.

    Raises CommandError where a process has ended.
    """
    token = federation.layout.operator_token
    console.print(
        f"\nserver and {len(federation.devices)} devices stay, for tasks and versions that you give them; Ctrl-C ends "
        f"them\ndashboard: {federation.address}/dashboard/   (token: {token})\ncommand line: export "
        f"ARCHIPEL_SERVER={federation.address} ARCHIPEL_TOKEN_FILE={quote(str(token))}",
        soft_wrap=True, highlight=False, markup=False,
    )  # fmt: skip

    def tell(text: str) -> None:
        console.print(text, soft_wrap=True, highlight=False, markup=False)

    told: set[str] = set()

    def tell_once(text: str) -> None:
        # A device refuses each round for the same reason until somebody has mended it.
        if text not in told:
            told.add(text)
            tell(text)

    try:
        while True:
            federation.collect_events(timeout=0.5, on_refused=tell_once)
    except KeyboardInterrupt:
        tell("stopped; the same command starts server and devices again")


def finish(folder: Path, metrics: Sequence[RoundMetrics], console: Console) -> None:
    """Write rounds.csv and, where there are metrics, curves.png; say which."""
    write_csv(metrics, folder / "rounds.csv")
    if curves(metrics):
        plot(metrics, folder / "curves.png")
        console.print(f"curves: {folder / 'curves.png'}   rounds: {folder / 'rounds.csv'}", soft_wrap=True)
    else:
        console.print(
            f"rounds: {folder / 'rounds.csv'}; no curves: devices of this strategy report no metrics while they train "
            "(with --evaluate-every 1 they measure each version)", soft_wrap=True, highlight=False,
        )  # fmt: skip


def held_out_metrics(folder: Path) -> tuple[Measured, Measured] | None:
    """What the published and the learned weights are worth on the held-out examples; None where there are none.

    Both are measured with `predict` of the bundle, as devices run it.
    """
    file = folder / HELD_OUT_FILE
    if not file.exists():
        return None
    fields = read_arrays(file)
    assert isinstance(fields, dict)
    publishers = [load_public_key(Layout(folder).publisher_key)]
    with tempfile.TemporaryDirectory() as cache:
        runtime = load(folder / BUNDLE_FILE, publishers, cache=cache, allow_development=True)
        program = upload_program(runtime.bundle.manifest, "evaluation")
        count = len(next(iter(fields.values())))
        before = measured(program, runtime.evaluate(fields), count)
        runtime.set_parameters(read_weights(folder / WEIGHTS_FILE))
        return before, measured(program, runtime.evaluate(fields), count)


def measure(folder: Path, console: Console) -> None:
    """Tell what was gained on the held-out examples."""
    found = held_out_metrics(folder)
    if found is None:
        return
    before, after = found
    gains = ", ".join(f"{name} {value:.4g} -> {after.values[name]:.4g}" for name, value in before.values.items())
    console.print(f"on {after.count} held-out examples: {gains}", soft_wrap=True, highlight=False)


def print_next(folder: Path, console: Console, stays: bool = False) -> None:
    """The commands that come next; `stays`: server and devices go on, so none starts them."""
    device = Path("devices", "1", "device.toml")
    bundle, weights, server, own = (quote(str(folder / name)) for name in (BUNDLE_FILE, WEIGHTS_FILE, "server", device))
    public = Layout(folder).publisher_key
    # The user's development key is what these commands take without the option.
    key = "" if is_development_key(load_public_key(public)) else f" --key {quote(str(public))}"
    held_out = folder / HELD_OUT_FILE
    predict = (
        "predict with what the devices learned (without --weights: with what they began from):",
        f"  archipel run {bundle}{key} --weights {weights} --input {quote(str(held_out))} --evaluate",
    )
    again = (
        "start server and devices again, for the dashboard, tasks and versions:",
        f"  archipel up --folder {quote(str(folder))} --stay",
        "take the federation apart (docs/quickstart.md):",
        f"  archipel serve start {server}",
        f"  archipel device run {own}",
    )
    for line in (
        f"result: {folder / WEIGHTS_FILE}",
        "",
        "take the model home:",
        f"  archipel export {bundle}{key} --weights {weights} -o trained.onnx",
        *(predict if held_out.exists() else ()),
        "see what is in it:",
        f"  archipel inspect {bundle}{key}",
        *(() if stays else again),
    ):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
