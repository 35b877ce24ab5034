"""`archipel bench`: measure the speed and the cost of a bundle on this machine, each row in fresh processes."""

from __future__ import annotations

import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np

from archipel.bundle import Program
from archipel.bundle.roles import Example, Label, Port
from archipel.cli.devices.run import DELEGATES
from archipel.cli.input_output.arrays import check_fields, read_fields
from archipel.cli.input_output.publisher_keys import publisher_keys, trusted_keys
from archipel.cli.input_output.sources import has_bundle, open_runtime
from archipel.client.conditions.probes.space import Memory
from archipel.engine_registry import ENGINES
from archipel.errors import CommandError
from archipel.lite_runtime import ModelRuntime
from archipel.lite_runtime.training.driver import need_program

# Calls that every process measures, however short --seconds is.
_LEAST = 10
# Different batches, which the measured fit goes through again and again.
_TRAIN_BATCHES = 8
_COLD = ("start", "import", "load", "first")


@dataclass
class Row:
    """One row of the result: a program, a number of threads and a batch size, with what was measured of them.

    Calls are in microseconds, the parts of the cold start in milliseconds, memory in bytes.
    A call is a prediction of `batch` examples, or a training step. `cpu_s_per_1000` is in CPU-seconds for 1000 calls.
    The parts of the cold start are medians over the processes, and so is `peak_bytes`.
    """

    what: str
    threads: int
    batch: int
    p50_us: float = 0.0
    p90_us: float = 0.0
    p99_us: float = 0.0
    calls: int = 0
    examples_per_s: float = 0.0
    cpu_s_per_1000: float = 0.0
    peak_bytes: int = 0
    cold_ms: dict[str, float] = field(default_factory=dict)


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@publisher_keys
@click.option("--input", "inputs", type=click.Path(path_type=Path),
              help=".npy or .npz with examples; the first ones are used. Default: random numbers.")  # fmt: skip
@click.option(
    "--batch", type=click.IntRange(1), default=1, show_default=True, help="Examples in one prediction or step."
)
@click.option("--threads", default="1", show_default=True, help="Threads for one operator; 1,2,4 measures each.")
@click.option(
    "--seconds", type=click.FloatRange(0), default=3.0, show_default=True, help="Seconds to measure each row."
)
@click.option(
    "--processes", type=click.IntRange(1, 100), default=5, show_default=True, help="Fresh processes for each row."
)
@click.option("--train", is_flag=True, help="Measure training steps as well.")
@click.option(
    "--profile/--no-profile", default=True, show_default=True, help="Print the operators that take the most time."
)
@DELEGATES
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
def bench(
    bundle: Path,
    key_files: tuple[Path, ...],
    inputs: Path | None,
    batch: int,
    threads: str,
    seconds: float,
    processes: int,
    train: bool,
    profile: bool,
    delegates: tuple[str, ...],
    as_json: bool,
) -> None:
    """Measure how fast BUNDLE (a file, a folder, or a saved model) is on this machine, and what it costs.

    \b
    archipel bench digits.bundle --key publisher.pub --threads 1,2
    archipel bench digits.bundle --key publisher.pub --train --batch 32 --json

    Each row comes from several fresh processes, in turns with the other rows. Cold start is the time that such a
    process needs until its first prediction: to start Python, import the runtime, load and verify the bundle, and
    predict once.
    """
    counts = _threads(threads)
    if not has_bundle(bundle):
        raise CommandError(f"{bundle}: a model file; make a bundle of it with `archipel convert`")
    keys = trusted_keys(bundle, key_files)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runtime = open_runtime(bundle, key_files, str(folder / "cache"), counts[0], delegates)
        kinds = ["predict", "train"] if train else ["predict"]
        rows, requests = [], []
        for kind in kinds:
            program = runtime.bundle.program(need_program(runtime.bundle, kind, f"be measured ({kind})"))
            fields = _fields(program, inputs, batch, kind)
            data = _write(folder / kind, fields)
            for count in counts:
                rows.append(Row(kind, count, batch))
                requests.append(
                    {
                        "bundle": str(bundle),
                        "cache": str(folder / "cache"),
                        "keys": [key.hex() for key in keys],
                        "delegates": list(delegates),
                        "threads": count,
                        "train": kind == "train",
                        "data": str(data),
                        "fields": list(fields),
                        "single": len(fields) == len(program.outputs) == 1,
                        "batch": batch,
                        # --seconds is the time of a row, which its processes share.
                        "seconds": seconds / processes,
                        "least": _LEAST,
                    }
                )
            if kind == "predict":
                examples = fields
        for row, answers in zip(rows, _measure(requests, rows, processes)):
            _summarize(row, answers)
        runtime.predict(examples)
        report = runtime.delegate_report()
        # Only ONNX Runtime's kernels can be measured one by one.
        engines = {name for placement in report.programs.values() for name in placement.delegates} & set(ENGINES)
        operators = runtime.profile(examples) if profile and not engines else None
    if as_json:
        result = {
            "bundle": runtime.bundle.manifest.name,
            "digest": runtime.bundle.digest,
            "machine": _machine(),
            "nodes": {name: placement.counts() for name, placement in report.programs.items()},
            "skipped": [skipped._asdict() for skipped in report.skipped],
            "rows": [asdict(row) for row in rows],
            "profile": None if operators is None else [row._asdict() for row in operators.rows],
            "profile_peak_bytes": None if operators is None else operators.peak_bytes,
            "limits_peak_bytes": runtime.bundle.manifest.limits.peak_bytes,
        }
        click.echo(json.dumps(result, allow_nan=False))
        return
    click.echo(f"{_table(runtime, rows)}\n\n{report.table()}")
    if operators is not None:
        click.echo(f"\n{operators.table(12)}")


def _threads(text: str) -> list[int]:
    try:
        counts = [int(each) for each in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1 or max(counts) > 1024 or len(set(counts)) != len(counts):
        raise CommandError(f"--threads {text}: expected numbers of at least 1, such as 1,2,4")
    return counts


def _fields(program: Program, path: Path | None, batch: int, kind: str) -> dict[str, np.ndarray]:
    """Arrays for the program's fields: `batch` examples to predict, or some batches of that size to train on."""
    roles: tuple[type[Port], ...] = (Example,) if kind == "predict" else (Example, Label)
    ports = [port for port in program.inputs if isinstance(port, roles)]
    rows = batch if kind == "predict" else batch * _TRAIN_BATCHES
    for port in ports:
        if isinstance(port.shape[0], int) and port.shape[0] != batch:
            raise CommandError(f"{kind} takes batches of {port.shape[0]} examples; give --batch {port.shape[0]}")
    _check_memory(ports, rows, batch)
    if path is None:
        generator = np.random.default_rng(0)
        return {port.name: _random(port, rows, generator) for port in ports}
    arrays = read_fields(path, program.inputs)
    check_fields(path, program.inputs, arrays, *roles)
    if not all(len(arrays[port.name]) for port in ports):
        raise CommandError(f"{path}: no examples; give at least one")
    # `resize` repeats the examples where the file has fewer than are needed.
    return {port.name: np.resize(arrays[port.name], (rows, *arrays[port.name].shape[1:])) for port in ports}


def _check_memory(ports: Sequence[Port], rows: int, batch: int) -> None:
    """Refuse a batch whose arrays do not fit into the free memory: this process makes them, its children read them."""
    if sys.platform not in ("linux", "android"):
        return
    # Random numbers are drawn as float64 first.
    sizes = [math.prod(dim for dim in port.shape[1:] if isinstance(dim, int)) for port in ports]
    need = rows * sum(size * (2 * np.dtype(port.dtype).itemsize + 8) for size, port in zip(sizes, ports))
    free = int(Memory(1).value())
    if need > free:
        raise CommandError(
            f"--batch {batch}: its examples need {need:,} bytes of memory, and {free:,} are free here; give a smaller "
            "--batch"
        )


def _random(port: Port, rows: int, generator: np.random.Generator) -> np.ndarray:
    free = [dim for dim in port.shape[1:] if isinstance(dim, str)]
    if free:
        raise CommandError(f"field {port.name!r}: dimension {free[0]!r} may have any size; give examples with --input")
    shape = (rows, *(dim for dim in port.shape[1:] if isinstance(dim, int)))
    if np.dtype(port.dtype).kind == "f":
        return generator.standard_normal(shape).astype(port.dtype)
    # 0 and 1 are classes, tokens or pixels of every model.
    return generator.integers(0, 2, shape).astype(port.dtype)


def _write(folder: Path, fields: dict[str, np.ndarray]) -> Path:
    folder.mkdir(parents=True)
    for index, array in enumerate(fields.values()):
        np.save(folder / f"{index}.npy", array)
    return folder


def _measure(requests: Sequence[dict[str, Any]], rows: Sequence[Row], processes: int) -> list[list[dict[str, Any]]]:
    answers: list[list[dict[str, Any]]] = [[] for _ in requests]
    for number in range(processes):
        # Rows take turns, so that a time in which the machine is slow affects all of them and not the last ones.
        for request, row, collected in zip(requests, rows, answers):
            click.echo(f"{row.what}, threads {row.threads}: process {number + 1} of {processes}", err=True)
            collected.append(_ask(request))
    return answers


def _ask(request: dict[str, Any]) -> dict[str, Any]:
    # This clock counts from one moment in all processes of a machine, so the child can subtract it from its own.
    spawned = time.monotonic_ns()
    command = [sys.executable, "-m", "archipel.cli.devices.bench_child"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        out, err = child.communicate(json.dumps({**request, "spawned_ns": spawned}).encode())
    if child.returncode == -signal.SIGKILL:
        raise CommandError("a process that measures was killed, mostly for want of memory; give a smaller --batch")
    if child.returncode:
        lines = err.decode(errors="replace").strip().splitlines() or ["no message"]
        # What Python prints of an exception begins with its class.
        reason = lines[-1].partition("Error: ")[2] if lines[-1].startswith("archipel.errors.") else lines[-1]
        raise CommandError(f"a process that measures ended with {child.returncode}: {reason[:300]}")
    answer: dict[str, Any] = json.loads(out)
    return answer


def _summarize(row: Row, answers: Sequence[dict[str, Any]]) -> None:
    # Percentiles are over the calls of all processes, and medians over the processes.
    calls = np.concatenate([answer["calls_us"] for answer in answers])
    row.p50_us, row.p90_us, row.p99_us = (float(each) for each in np.percentile(calls, [50, 90, 99]))
    row.calls = len(calls)
    row.examples_per_s = row.batch * len(calls) / (calls.sum() / 1e6)
    row.cpu_s_per_1000 = 1000 * sum(answer["cpu_s"] for answer in answers) / len(calls)
    row.peak_bytes = int(statistics.median(answer["peak_bytes"] for answer in answers))
    parts = {part: [answer[f"{part}_ms"] for answer in answers] for part in _COLD}
    row.cold_ms = {part: statistics.median(times) for part, times in parts.items()}
    # The median of the sums, not the sum of the medians: these may be of different processes.
    row.cold_ms["total"] = statistics.median(map(sum, zip(*parts.values())))


def _table(runtime: ModelRuntime, rows: Sequence[Row]) -> str:
    lines = [
        f"{runtime.bundle.manifest.name}  digest {runtime.bundle.digest[:16]}",
        ", ".join(f"{name} {value}" for name, value in _machine().items()),
        "",
        f"{'':<9}{'threads':>7}{'batch':>7}{'p50 us':>10}{'p90 us':>10}{'p99 us':>10}{'examples/s':>12}"
        f"{'CPU s/1000':>12}{'peak MB':>9}",
    ]
    for row in rows:
        lines.append(
            f"{row.what:<9}{row.threads:>7}{row.batch:>7}{row.p50_us:>10.1f}{row.p90_us:>10.1f}{row.p99_us:>10.1f}"
            f"{row.examples_per_s:>12,.0f}{row.cpu_s_per_1000:>12.3f}{row.peak_bytes / 1e6:>9.1f}"
        )
    lines += ["", f"{'cold start, ms':<16}{'total':>9}" + "".join(f"{part:>9}" for part in _COLD)]
    for row in rows:
        lines.append(
            f"{f'{row.what}, {row.threads}':<16}{row.cold_ms['total']:>9.1f}"
            + "".join(f"{row.cold_ms[part]:>9.1f}" for part in _COLD)
        )
    return "\n".join(lines)


def _machine() -> dict[str, str]:
    import onnxruntime

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    machine = {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": str(cores),
        "python": platform.python_version(),
        "onnxruntime": str(onnxruntime.__version__),
    }
    if hasattr(os, "getloadavg"):
        machine["load"] = f"{os.getloadavg()[0]:.1f}"
    return machine
