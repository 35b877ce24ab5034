"""Time and peak memory of one training step against PyTorch, interleaved in one run.

Forward, backward and SGD with momentum at batch 1, 10 and 32, 2 threads. Ours is the step graph on ONNX Runtime with
parameters and state in two sets of buffers that swap roles. PyTorch is eager and torch.compile, on the same data, each
in the fastest of its own ways, which is found by measurement first: images in either memory layout, the optimizer fused
or over lists of tensors, memory given back to the system or kept. The column "peer" says which one it was. Each engine
has a process of its own, so that none shares an allocator or thread pools with another.

    python benchmarks/step.py                       everything (about 20 minutes, most of it torch.compile)
    python benchmarks/step.py --quick               PyTorch eager only, fewer cases, under a minute
    python benchmarks/step.py --only LSTM --batch 32 --profile
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

import numpy as np
from measure import KEPT_MEMORY, PAUSE, Report, Row, arguments, compare

THREADS = 2
BATCHES = (1, 10, 32)
EAGER, COMPILED, OURS = "PyTorch eager", "torch.compile", "archipel"
QUICK = ("MLP", "LeNet", "FedAvg CNN", "1D-CNN")


@dataclass(frozen=True)
class Case:
    """A network of the zoo, the shape of one example (int: tokens below that number) and its number of classes."""

    make: str
    shape: tuple[int, ...]
    classes: int
    options: tuple[tuple[str, Any], ...] = ()
    vocabulary: int = 0


CASES = {
    "MLP": Case("mlp", (784,), 10),
    "LeNet": Case("lenet", (1, 28, 28), 10),
    "FedAvg CNN": Case("fedavg_cnn", (1, 28, 28), 10),
    "ResNet-8": Case("resnet8", (3, 32, 32), 10),
    "DS-CNN": Case("ds_cnn", (1, 49, 10), 12),
    "MobileNetV2": Case("mobilenet_v2", (3, 32, 32), 10),
    "1D-CNN": Case("cnn_1d", (6, 128), 6),
    "LSTM": Case("char_rnn", (80,), 80, (("cell", "lstm"),), vocabulary=80),
    "Transformer": Case("transformer", (64,), 80, vocabulary=80),
}


def data(case: Case, batch: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    if case.vocabulary:
        x = rng.integers(0, case.vocabulary, (batch, *case.shape))
        return x, rng.integers(0, case.classes, (batch, *case.shape))
    return rng.standard_normal((batch, *case.shape), np.float32), rng.integers(0, case.classes, batch)


def network(case: Case) -> Any:
    from archipel import models

    return getattr(models, case.make)(0, **dict(case.options))


def step_file(case: Case, path: Path) -> Any:
    """Writes the step graph; returns its Model."""
    from archipel import Model, training

    model = Model.from_torch(network(case).train(), data(case, 2)[0])
    loss = training.losses.cross_entropy(axis=-1) if case.vocabulary else training.losses.cross_entropy()
    step = training.step_graph(model, loss, training.optimizers.sgd(momentum=0.9))
    step.save(path)
    return step


def ours(step: Any, path: Path, x: np.ndarray, y: np.ndarray, profile: bool = False) -> tuple[Callable[[], None], Any]:
    """A callable that runs one step, and its session."""
    import onnxruntime as ort

    from archipel.bundle.roles import Parameter, Personal, State
    from archipel.training import StepRunner

    options = ort.SessionOptions()
    options.intra_op_num_threads = THREADS
    options.log_severity_level = 3
    if profile:
        options.enable_profiling = True
        options.profile_file_prefix = str(path.with_suffix(""))
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    runner = StepRunner(step, {"lr": 1e-4})
    inputs = {p.tensor: p.name for p in step.signature.inputs if isinstance(p, Parameter | Personal | State)}
    outputs = {p.tensor: p.name for p in step.signature.outputs if isinstance(p, Parameter | Personal | State)}
    sets = [
        {name: ort.OrtValue.ortvalue_from_numpy(np.array(runner.tensors[name])) for name in inputs} for _ in range(2)
    ]
    fields = [p.name for p in step.signature.inputs if p.name not in inputs.values()]
    scalars = {name: value for name, value in runner._scalars.items() if name in fields}
    loss = ort.OrtValue.ortvalue_from_numpy(np.zeros((), np.float32))
    bindings = []
    for read, write in ((sets[0], sets[1]), (sets[1], sets[0])):
        binding = session.io_binding()
        for name, port in inputs.items():
            binding.bind_ortvalue_input(port, read[name])
        for name, port in outputs.items():
            binding.bind_ortvalue_output(port, write[name])
        for name, value in scalars.items():
            binding.bind_cpu_input(name, value)
        binding.bind_ortvalue_output("loss", loss)
        bindings.append(binding)
    names = [name for name in fields if name not in scalars]

    def run() -> None:
        binding = bindings[0]
        for name, value in zip(names, (x, y)):
            binding.bind_cpu_input(name, value)
        session.run_with_iobinding(binding)
        loss.numpy().item()
        bindings.reverse()

    return run, session


@dataclass(frozen=True)
class Way:
    """How PyTorch is set up; a caller finds the fastest."""

    channels_last: bool
    optimizer: str
    keeps_memory: bool = True

    def __str__(self) -> str:
        layout = "channels_last" if self.channels_last else "contiguous"
        return f"{layout}, {self.optimizer} SGD" + (", memory kept" if self.keeps_memory else "")

    @property
    def environment(self) -> dict[str, str]:
        """PyTorch frees activations and gradients in every step."""
        return KEPT_MEMORY if self.keeps_memory else {}


def ways(x: np.ndarray) -> list[Way]:
    layouts = (False, True) if x.ndim == 4 else (False,)
    return [Way(layout, *rest) for layout in layouts for rest in (("fused", True), ("foreach", True), ("fused", False))]


def torch_step(case: Case, x: np.ndarray, y: np.ndarray, compiled: bool, way: Way) -> Callable[[], None]:
    import torch
    from torch.nn import functional

    torch.set_num_threads(THREADS)
    net = network(case).train()
    inputs, labels = torch.from_numpy(x), torch.from_numpy(y)
    if way.channels_last:
        net, inputs = net.to(memory_format=torch.channels_last), inputs.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9, **{way.optimizer: True})

    def loss_of(inputs: Any, labels: Any) -> Any:
        logits = net(inputs)
        return functional.cross_entropy(logits.flatten(0, -2), labels.flatten())

    forward = torch.compile(loss_of) if compiled else loss_of

    def run() -> None:
        optimizer.zero_grad()
        loss = forward(inputs, labels)
        loss.backward()
        optimizer.step()
        loss.item()

    return run


class Engine:
    """A process that makes one step when asked."""

    def __init__(self, engine: str, name: str, batch: int, path: Path, way: Way | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, its_end = context.Pipe()
        self._process = context.Process(target=serve, args=(its_end, engine, name, batch, path, way), daemon=True)
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


def serve(pipe: Any, engine: str, name: str, batch: int, path: Path, way: Way | None) -> None:
    """What an Engine's process does: says its name, then the milliseconds of a step for each True."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    case = CASES[name]
    x, y = data(case, batch)
    if way is None:
        run, _ = ours(kept_step(path), path, x, y)
        pipe.send(OURS)
    else:
        run = torch_step(case, x, y, engine == COMPILED, way)
        pipe.send(f"{engine}, {way}")
    for _ in range(3):
        run()
    while pipe.recv():
        run()
        started = time.perf_counter()
        run()
        pipe.send((time.perf_counter() - started) * 1e3)


def in_turns(engines: list[Engine], seconds: float) -> dict[str, list[float]]:
    """Milliseconds a step by engine, in rounds in which each has its turn, for about `seconds` each."""
    times: dict[str, list[float]] = {engine.name: [] for engine in engines}
    end = time.perf_counter() + seconds * len(engines)
    while time.perf_counter() < end or len(times[engines[0].name]) < 5:
        for engine in engines:
            time.sleep(PAUSE)
            times[engine.name].append(engine.step())
    return times


def fastest(engine: str, name: str, batch: int, path: Path, seconds: float) -> Engine:
    """PyTorch's best way for this network and batch, by the median of steps in turns, in the process that it had.

    Not several in one process, where they share what the C library keeps: of two that were set up alike the second took
    twice the time of the first.
    """
    tried = [Engine(engine, name, batch, path, way) for way in ways(data(CASES[name], batch)[0])]
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
    if engine == OURS:
        import archipel.training

        step = kept_step(path)
        del archipel
        before = _peak()
        run, _ = ours(step, path, x, y)
    else:
        import torch

        run = torch_step(case, x, y, engine == COMPILED, ways(x)[0])
        before = _peak()
        del torch
    for _ in range(20):
        run()
    return (_peak() - before) / 1024


def _peak() -> int:
    """KiB. Not from getrusage, which starts with the peak of the process that started this one."""
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text()).group(1))  # type: ignore[union-attr]


def _program(text: str) -> Any:
    import msgspec

    from archipel.bundle.roles import Program

    return msgspec.json.decode(text, type=Program)


def keep(step: Any, path: Path) -> None:
    """What the memory measurement needs besides the graph, so that it does not build anything."""
    import msgspec

    path.with_suffix(".json").write_text(json.dumps({"signature": msgspec.json.encode(step.signature).decode()}))
    np.savez(path.with_suffix(".npz"), **step.initial)


def kept_step(path: Path) -> Any:
    """The step that `keep` kept, without what had made it."""
    from archipel.graph.model import Model

    step = Model.from_onnx(path)
    step.signature = _program(json.loads(path.with_suffix(".json").read_text())["signature"])
    step.initial = dict(np.load(path.with_suffix(".npz")))
    return step


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
    report = Report(options.json, ("numpy", "onnxruntime", "torch"))
    for name, case, batches in selected(options):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "step.onnx"
            step = step_file(case, path)
            keep(step, path)
            for batch in batches:
                names = (OURS, EAGER) if options.quick or options.no_compile else (OURS, EAGER, COMPILED)
                engines: list[Engine] = []
                try:
                    for engine in names:
                        if engine == OURS:
                            engines.append(Engine(engine, name, batch, path))
                        else:
                            engines.append(fastest(engine, name, batch, path, options.seconds / 2))
                    times = in_turns(engines, options.seconds)
                finally:
                    for running in engines:
                        running.close()
                report.add(compare("step", f"{name} batch {batch}", OURS, times))
                if options.profile:
                    show_profile(*ours(step, path, *data(case, batch), profile=True))
            if not (options.quick or options.no_memory):
                batch = batches[-1]
                mine = peak_memory(name, batch, OURS, path)
                for peer in (EAGER,) if options.no_compile else (EAGER, COMPILED):
                    theirs = peak_memory(name, batch, peer, path)
                    ratio = mine / max(theirs, 1e-9)
                    report.add([Row("step memory", f"{name} batch {batch}", mine, theirs, peer, ratio, "MB")])


if __name__ == "__main__":
    main()
