"""Time and peak memory of one training step against PyTorch, interleaved in one run.

Forward, backward and SGD with momentum at batch 1, 10 and 32, 2 threads. Ours is the step graph on ONNX Runtime with
parameters and state in two sets of buffers that swap roles; where the kernel pack is installed (docs/device.md), a
second one runs its operators. PyTorch is eager and torch.compile, on the same data, each
in the fastest of its own ways, which is found by measurement first: images in either memory layout, the optimizer fused
or over lists of tensors, memory given back to the system or kept. The column "peer" says which one it was. Each engine
has a process of its own, so that none shares an allocator or thread pools with another.

    python benchmarks/step.py                       everything (about 20 minutes, most of it torch.compile)
    python benchmarks/step.py --quick               PyTorch eager only, fewer cases, under a minute
    python benchmarks/step.py --only LSTM --batch 32 --profile
    python benchmarks/step.py --threads 1 --processor-time --no-compile      on a machine that others use as well

`benchmarks/step_classes.py` says what the steps spend their time on.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from measure import PAUSE, Report, Row, arguments, compare
from step_cases import CASES, Case, Way, data, keep, kept_step, ours, step_file, torch_step, ways

BATCHES = (1, 10, 32)
EAGER, COMPILED, OURS, NATIVE = "PyTorch eager", "torch.compile", "archipel", "archipel with the kernel pack"
QUICK = ("MLP", "LeNet", "FedAvg CNN", "1D-CNN")


@dataclass(frozen=True)
class Setting:
    """How every engine runs: its threads, and whether its own processor time is taken and not the clock's."""

    threads: int
    processor_time: bool

    def now(self) -> float:
        return time.process_time() if self.processor_time else time.perf_counter()


class Engine:
    """A process that makes one step when asked."""

    def __init__(
        self, engine: str, name: str, batch: int, path: Path, setting: Setting, way: Way | None = None
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, its_end = context.Pipe()
        self._process = context.Process(
            target=serve, args=(its_end, engine, name, batch, path, setting, way), daemon=True
        )
        with mock.patch.dict(os.environ, {} if way is None else way.environment):
            self._process.start()
        its_end.close()
        self.name: str = self._pipe.recv()

    def step(self) -> float:
        """Milliseconds of one step, after one that is not timed: others have used the caches meanwhile."""
        self._pipe.send(True)
        taken: float = self._pipe.recv()
        return taken

    def close(self) -> None:
        self._pipe.send(False)
        self._process.join(20)
        self._process.terminate()


def serve(pipe: Any, engine: str, name: str, batch: int, path: Path, setting: Setting, way: Way | None) -> None:
    """What an Engine's process does: says its name, then the milliseconds of a step for each True."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    case = CASES[name]
    x, y = data(case, batch)
    if way is None:
        run, _ = ours(kept_step(path), path, x, y, setting.threads, kernels=engine == NATIVE)
        pipe.send(engine)
    else:
        run = torch_step(case, x, y, engine == COMPILED, way, setting.threads)
        pipe.send(f"{engine}, {way}")
    for _ in range(3):
        run()
    while pipe.recv():
        run()
        started = setting.now()
        run()
        pipe.send((setting.now() - started) * 1e3)


def in_turns(engines: list[Engine], seconds: float) -> dict[str, list[float]]:
    """Milliseconds a step by engine, in rounds in which each has its turn, for about `seconds` each."""
    times: dict[str, list[float]] = {engine.name: [] for engine in engines}
    end = time.perf_counter() + seconds * len(engines)
    while time.perf_counter() < end or len(times[engines[0].name]) < 5:
        for engine in engines:
            time.sleep(PAUSE)
            times[engine.name].append(engine.step())
    return times


def fastest(engine: str, name: str, batch: int, path: Path, setting: Setting, seconds: float) -> Engine:
    """PyTorch's best way for this network and batch, by the median of steps in turns, in the process that it had.

    Not several in one process, where they share what the C library keeps: of two that were set up alike the second took
    twice the time of the first.
    """
    tried = [Engine(engine, name, batch, path, setting, way) for way in ways(data(CASES[name], batch)[0])]
    times = in_turns(tried, seconds)
    best = min(tried, key=lambda each: statistics.median(times[each.name]))
    for each in tried:
        if each is not best:
            each.close()
    return best


def peak_memory(name: str, batch: int, engine: str, path: Path) -> float:
    """MB that 20 steps add to the peak of a process that has everything imported and the model loaded."""
    command = [
        sys.executable,
        __file__,
        "--memory",
        engine,
        "--only",
        name,
        "--batch",
        str(batch),
        "--graph",
        str(path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout)


def measure_memory(name: str, batch: int, engine: str, path: Path) -> float:
    case = CASES[name]
    x, y = data(case, batch)
    if engine in (OURS, NATIVE):
        import archipel.training

        step = kept_step(path)
        del archipel
        before = _peak()
        run, _ = ours(step, path, x, y, 2, kernels=engine == NATIVE)
    else:
        import torch

        run = torch_step(case, x, y, engine == COMPILED, ways(x)[0], 2)
        before = _peak()
        del torch
    for _ in range(20):
        run()
    return (_peak() - before) / 1024


def _peak() -> int:
    """KiB. Not from getrusage, which starts with the peak of the process that started this one."""
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text()).group(1))  # type: ignore[union-attr]


def show_profile(run: Callable[[], None], session: Any, steps: int = 50) -> None:
    """Microseconds a step and nodes by operator, from ONNX Runtime's own trace."""
    for _ in range(steps):
        run()
    times: dict[str, list[float]] = {}
    for event in json.loads(Path(session.end_profiling()).read_text()):
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            times.setdefault(event["args"]["op_name"], []).append(event["dur"])
    everything = sum(map(sum, times.values()))
    for op, spent in sorted(times.items(), key=lambda item: -sum(item[1]))[:14]:
        share, each, nodes = sum(spent) / everything, sum(spent) / steps, len(spent) // steps
        print(f"    {op:<22}{share:6.1%}{each:>9.0f} us  {nodes:>4} nodes", file=sys.stderr)


def selected(options: argparse.Namespace) -> Iterator[tuple[str, Case, list[int]]]:
    for name, case in CASES.items():
        if (not options.only or name in options.only) and (not options.quick or options.only or name in QUICK):
            yield name, case, options.batch or list(BATCHES if not options.quick else (32,))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", action="append", choices=CASES, help="only this model; can be repeated")
    parser.add_argument("--batch", action="append", type=int, help="only this batch size; can be repeated")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out (it compiles for minutes)")
    parser.add_argument("--no-memory", action="store_true", help="leave the memory rows out")
    parser.add_argument("--profile", action="store_true", help="print where our time goes, to standard error")
    parser.add_argument("--threads", type=int, default=2, help="of each engine")
    parser.add_argument(
        "--processor-time", action="store_true", help="of each engine's process; waiting does not count"
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each engine and case")
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    parser.add_argument("--graph", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if options.memory:
        print(measure_memory(options.only[0], options.batch[0], options.memory, options.graph))
        return
    if options.quick:
        options.seconds = 0.6
    os.environ.setdefault("TORCH_LOGS", "-all")
    report = Report(options.json, ("numpy", "onnxruntime", "torch", *(("archipel-kernels",) if _has_pack() else ())))
    for name, case, batches in selected(options):
        with tempfile.TemporaryDirectory() as folder:
            measure(name, case, batches, Path(folder), options, report)


def _has_pack() -> bool:
    from archipel.lite_runtime.engines.kernels import kernel_pack

    return kernel_pack().library is not None


def measure(
    name: str, case: Case, batches: list[int], folder: Path, options: argparse.Namespace, report: Report
) -> None:
    """Print the rows of one network."""
    setting = Setting(options.threads, options.processor_time)
    # Where no weight of a convolution is trained the pack changes nothing.
    paths = {OURS: folder / "step.onnx", NATIVE: folder / "native.onnx"}
    step, native = (step_file(case, path, kernels=engine == NATIVE) for engine, path in paths.items())
    keep(step, paths[OURS])
    keep(native, paths[NATIVE])
    mine = [OURS, NATIVE] if _has_pack() and native.ir.functions else [OURS]
    peers = [EAGER] if options.quick or options.no_compile else [EAGER, COMPILED]
    for batch in batches:
        title = f"{name} batch {batch}"
        engines: list[Engine] = []
        try:
            engines += [Engine(engine, name, batch, paths[engine], setting) for engine in mine]
            engines += [fastest(engine, name, batch, paths[OURS], setting, options.seconds / 2) for engine in peers]
            times = in_turns(engines, options.seconds)
        finally:
            for running in engines:
                running.close()
        report.add(compare("step", title, OURS, {key: value for key, value in times.items() if key != NATIVE}))
        if NATIVE in times:
            report.add(compare("step", f"{title}, kernel pack", NATIVE, times))
        if options.profile:
            show_profile(*ours(step, paths[OURS], *data(case, batch), options.threads, profile=True))
    if not (options.quick or options.no_memory):
        batch = batches[-1]
        for engine in mine:
            used = peak_memory(name, batch, engine, paths[engine])
            title = f"{name} batch {batch}" + ", kernel pack" * (engine == NATIVE)
            for peer in peers:
                theirs = peak_memory(name, batch, peer, paths[OURS])
                ratio = used / max(theirs, 1e-9)
                report.add([Row("step memory", title, used, theirs, peer, ratio, "MB")])


if __name__ == "__main__":
    main()
