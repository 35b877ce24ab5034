"""CPU seconds of an epoch: the agent's training against a plain loop of ONNX Runtime over the same train graph."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from agent_federation import PRIVACY
from agent_process import all_seconds, memory
from lite_fit import initial
from lite_models import quiet
from lite_predict import raw_session
from measure import Row

from archipel import bundle as b
from archipel.bundle.roles import Example, Hyperparameter, Label, Metric, Parameter, State
from archipel.client import AgentConfig
from archipel.client.memory.decisions import DecisionBook
from archipel.client.rounds.work import Prepared, contribute
from archipel.lite_runtime import DeviceState, Runtime
from archipel.lite_runtime.isolated.starter import Starter
from archipel.protocol.messages import RoundPlan
from archipel.protocol.sealed import public_bytes
from archipel.protocol.uploads import upload_layout

BATCH = 32
SHAPES = {"mlp": ((784,), 10), "cnn_1d": ((6, 128), 6)}
NAMES = {"mlp": "MLP", "cnn_1d": "1D-CNN"}


@dataclass
class Network:
    """A network of the zoo that trains an epoch a round with SGD and momentum, and noise to train it on."""

    make: str
    folder: Path
    examples: int
    key: Any

    @property
    def name(self) -> str:
        return NAMES[self.make]

    @cached_property
    def bundle(self) -> b.Bundle:
        from archipel import models, training
        from archipel.converter import Signing, Training, convert

        path = self.folder / self.make
        with quiet():
            convert(
                getattr(models, self.make)(0),
                path,
                example=self.arrays[0][:2],
                name=self.make,
                training=Training(
                    training.losses.cross_entropy(), training.optimizers.sgd(momentum=0.9), batch_size=BATCH
                ),
                privacy=PRIVACY,
                signing=Signing(self.key),
            )
        return b.open_bundle(path, self.publisher_keys)

    @cached_property
    def file(self) -> Path:
        path = self.folder / f"{self.make}.bundle"
        b.pack(self.folder / self.make, path)
        return path

    @property
    def publisher_keys(self) -> list[bytes]:
        return [public_bytes(self.key)]

    @cached_property
    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        shape, classes = SHAPES[self.make]
        rng = np.random.default_rng(0)
        return rng.standard_normal((self.examples, *shape), np.float32), rng.integers(0, classes, self.examples)

    @property
    def fields(self) -> dict[str, np.ndarray]:
        x, y = self.arrays
        inputs = self.bundle.program("train").inputs
        return {
            each.name: x if isinstance(each, Example) else y for each in inputs if isinstance(each, Example | Label)
        }

    def data(self) -> Path:
        """An .npz of the fields."""
        path = self.folder / f"{self.make}-fields.npz"
        np.savez(path, **self.fields)
        return path

    def pairs(self) -> Path:
        """An .npz of x and y, for those that know no bundle."""
        path = self.folder / f"{self.make}-pairs.npz"
        x, y = self.arrays
        np.savez(path, x=x, y=y)
        return path


def epoch_rows(network: Network, repeats: int) -> list[Row]:
    """CPU seconds from the verified bundle and the start's parameters to the update, in this process and in child
    processes, against the same with ONNX Runtime alone; sessions are made in all of them.

    Of child processes: one that is forked from a helper that is there, one with the helper's start, as in the first
    round after a pause, and one that is a new Python. The memory of the helper while it waits comes last."""
    starter, child = Starter(600.0), agent_epoch(network, isolated=True)

    def first() -> None:
        with closing(Starter(600.0)) as other:
            child(other)

    runs: dict[str, Callable[[], object]] = {
        "in this process": agent_epoch(network, isolated=False),
        "in a child process": partial(child, starter),
        "in a child process, with the helper's start": first,
        "in a child process that is a new Python": child,
        "bound": plain_epoch(network),
        "run": plain_epoch(network, bound=False),
    }
    taken: dict[str, list[float]] = {name: [] for name in runs}
    with closing(starter):
        for index in range(repeats + 1):
            for name, run in runs.items():
                started = cpu_seconds(starter)
                run()
                if index:
                    taken[name].append(cpu_seconds(starter) - started)
        waiting = memory(starter.pid or 0)
    best = min(("bound", "run"), key=lambda name: statistics.median(taken[name]))
    peer = f"ONNX Runtime loop ({best})"
    rows = []
    for name in list(runs)[:4]:
        ratio = statistics.median(x / y for x, y in zip(taken[name], taken[best]))
        ours, theirs = statistics.median(taken[name]), statistics.median(taken[best])
        rows.append(Row("agent", f"{network.name} epoch, {name}", ours, theirs, peer, ratio, "s"))
    none = float("nan")
    return [
        *rows,
        *(Row("agent", f"helper, waits, {kind}", mib, none, "", none, "MiB") for kind, mib in waiting.items()),
    ]


def cpu_seconds(starter: Starter) -> float:
    """Of this process, of children that have ended, and of the starter's helper and its children that have ended (in
    ticks of 10 ms)."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    forked = all_seconds(starter.pid) if starter.pid else 0.0
    return time.process_time() + ended.ru_utime + ended.ru_stime + forked


def agent_epoch(network: Network, isolated: bool) -> Callable[..., Mapping[str, np.ndarray]]:
    """What the agent does between the plan and the update, with what it fetched at hand; the starter is optional."""
    bundle = network.bundle
    nothing = "0" * 64
    plan = RoundPlan(
        round_id="0" * 32, task_id="0" * 32, number=0, bundle=nothing, weights=nothing, privacy="plain",
        min_cohort=2, max_cohort=2, threshold=2, modulus_bits=32,
    )  # fmt: skip
    layout = upload_layout(bundle.manifest, plan.kind, plan.program, plan.metrics)
    prepared = Prepared(bundle, layout, Runtime(bundle).parameters(), {})
    config = AgentConfig(folder=network.folder / "unused", isolated=isolated)

    def run(starter: Starter | None = None) -> Mapping[str, np.ndarray]:
        return contribute(
            prepared,
            plan,
            seed=0,
            fields=network.fields,
            state=DeviceState(),
            publisher_keys=network.publisher_keys,
            config=config,
            check=lambda: None,
            decisions=DecisionBook(config.folder),
            starter=starter,
        ).arrays

    return run


def plain_epoch(network: Network, bound: bool = True) -> Callable[[], Mapping[str, np.ndarray]]:
    """A loop as one would write it for this graph alone: shuffle, gather, step, and the difference at the end.

    `bound`: buffers that are bound once, two sets of what moves that swap roles; else feeds and fetches.
    """
    program, bundle = network.bundle.program("train"), network.bundle
    x, y = network.arrays
    moving = [each for each in program.inputs if isinstance(each, Parameter | State)]
    constant = {p.name: np.asarray(p.default, p.dtype) for p in program.inputs if isinstance(p, Hyperparameter)}
    fields = {p.name: x if isinstance(p, Example) else y for p in program.inputs if isinstance(p, Example | Label)}
    written = {(type(p), p.tensor): p.name for p in program.outputs if isinstance(p, Parameter | State)}
    metrics = [p for p in program.outputs if isinstance(p, Metric)]
    path = Path(network.folder / network.make / program.file)

    def first() -> dict[str, np.ndarray]:
        return {
            p.name: np.array(bundle.tensor(p.tensor)) if isinstance(p, Parameter) else initial(bundle, p)
            for p in moving
        }

    def order() -> list[np.ndarray]:
        return np.split(np.random.default_rng(0).permutation(len(x)), range(BATCH, len(x), BATCH))

    def difference(last: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {p.tensor: last[p.name] - bundle.tensor(p.tensor) for p in moving if isinstance(p, Parameter)}

    def run() -> dict[str, np.ndarray]:
        session, now = raw_session(path, 1), first()
        names = [written[type(p), p.tensor] for p in moving]
        for chosen in order():
            given = {name: array[chosen] for name, array in fields.items()}
            out = session.run([*names, *(p.name for p in metrics)], {**given, **constant, **now})
            now = {p.name: array for p, array in zip(moving, out)}
            float(out[-1])
        return difference(now)

    def run_bound() -> dict[str, np.ndarray]:
        import onnxruntime as ort

        value = ort.OrtValue.ortvalue_from_numpy
        session, now = raw_session(path, 1), first()
        sets = [now, {name: np.empty_like(array) for name, array in now.items()}]
        batch = {name: np.empty((BATCH, *array.shape[1:]), array.dtype) for name, array in fields.items()}
        told = {p.name: np.zeros((), p.dtype) for p in metrics}
        kept = {name: value(array) for name, array in {**batch, **constant, **told}.items()}
        swapped = [{name: value(array) for name, array in each.items()} for each in sets]
        bindings = []
        for index in range(2):
            binding = session.io_binding()
            for name, held in {**swapped[index], **{name: kept[name] for name in (*batch, *constant)}}.items():
                binding.bind_ortvalue_input(name, held)
            for p in moving:
                binding.bind_ortvalue_output(written[type(p), p.tensor], swapped[1 - index][p.name])
            for name in told:
                binding.bind_ortvalue_output(name, kept[name])
            bindings.append(binding)
        for index, chosen in enumerate(order()):
            for name, array in fields.items():
                np.take(array, chosen, axis=0, out=batch[name], mode="clip")
            session.run_with_iobinding(bindings[index % 2])
            for array in told.values():
                float(array)
        return difference(sets[(index + 1) % 2])

    return run_bound if bound else run
