"""`fit` against its own step graph run without us, and transfer learning with the feature cache against without."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from lite_models import Files, loaded, takes
from lite_predict import OURS, raw_session, say
from measure import Row, compare

RATE = 1e-4
"""So low that hundreds of repetitions on noise keep a finite loss."""


def fit_rows(files: Files, threads: int, batch: int, rounds: int, seconds: float) -> list[Row]:
    """Milliseconds a step of one `fit` over one epoch, everything it does included, and of the raw step graph.

    The raw one gets batches that were gathered before, and so pays neither for shuffling nor for gathering.
    """
    bundle = files.train(batch)
    runtime = loaded(files, bundle, threads)
    path = bundle / "train.onnx"
    runs, steps = {}, 8
    for _ in range(2):
        x, y = files.data(batch * steps)
        runs = {
            OURS: our_fit(runtime, x, y, batch),
            "the step graph alone": raw_fit(runtime.bundle, path, threads, x, y, batch),
        }
        took = once(runs["the step graph alone"])
        steps = int(np.clip(seconds * steps / took, 8, 512))
    losses = [run() for run in runs.values()]
    if not np.allclose(losses[0], losses[1], rtol=0.2):
        say(f"{files.name} fit: losses differ: {losses}")
    times: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(rounds):
        for name in list(runs) if index % 2 else reversed(runs):
            time.sleep(0.003)
            times[name].append(once(runs[name]) * 1e3 / steps)
    return compare("lite", f"{files.name} fit batch {batch}, {threads} thread{'s' * (threads > 1)}", OURS, times)


def once(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def our_fit(runtime: Any, x: np.ndarray, y: np.ndarray, batch: int) -> Callable[[], float]:
    def run() -> float:
        history = runtime.fit(x, y, epochs=1, batch_size=batch, seed=0, hyperparameters={"lr": RATE})
        return statistics.fmean(history.losses)

    return run


def raw_fit(bundle: Any, path: Any, threads: int, x: np.ndarray, y: np.ndarray, batch: int) -> Callable[[], float]:
    """Steps of train.onnx with all inputs and outputs bound and two sets of buffers that swap roles."""
    import onnxruntime as ort

    from archipel.bundle.roles import Example, Hyperparameter, Label, Metric, Parameter, State

    session = raw_session(path, threads)
    program = bundle.program("train")
    moving = {(type(p), p.tensor): p.name for p in program.inputs if isinstance(p, Parameter | State)}
    first = {
        p.name: np.array(bundle.tensor(p.tensor)) if isinstance(p, Parameter) else initial(bundle, p)
        for p in program.inputs
        if isinstance(p, Parameter | State)
    }
    sets = [{name: ort.OrtValue.ortvalue_from_numpy(array.copy()) for name, array in first.items()} for _ in range(2)]
    fields = {p.name: x if isinstance(p, Example) else y for p in program.inputs if isinstance(p, Example | Label)}
    batches = [
        {name: ort.OrtValue.ortvalue_from_numpy(array[at : at + batch].copy()) for name, array in fields.items()}
        for at in range(0, len(x), batch)
    ]
    constant = {
        p.name: ort.OrtValue.ortvalue_from_numpy(np.asarray(RATE if p.name == "lr" else p.default, p.dtype))
        for p in program.inputs
        if isinstance(p, Hyperparameter)
    }
    metrics = {p.name: np.zeros((), p.dtype) for p in program.outputs if isinstance(p, Metric)}
    kept = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in metrics.items()}

    def bindings() -> Iterator[Any]:
        for index, given in enumerate(batches):
            read, write = sets[index % 2], sets[(index + 1) % 2]
            binding = session.io_binding()
            for name, value in {**given, **constant, **read}.items():
                binding.bind_ortvalue_input(name, value)
            for port in program.outputs:
                key = (type(port), getattr(port, "tensor", ""))
                binding.bind_ortvalue_output(port.name, kept[port.name] if port.name in kept else write[moving[key]])
            yield binding

    # Bound once for every batch, before anything is timed.
    bound = list(bindings())
    loss = metrics["loss"]

    def run() -> float:
        losses = []
        for binding in bound:
            session.run_with_iobinding(binding)
            losses.append(float(loss))
        return statistics.fmean(losses)

    return run


def initial(bundle: Any, port: Any) -> np.ndarray:
    return (
        np.array(bundle.tensor(port.init)) if isinstance(port.init, str) else np.full(port.shape, port.init, port.dtype)
    )


def transfer_rows(files: Files, threads: int, rounds: int, epochs: int = 10, batch: int = 32) -> list[Row]:
    """Seconds for `epochs` over a frozen network with a new last layer. Both start from the published parameters."""
    runtime = loaded(files, files.transfer(batch), threads)
    if not takes(runtime.fit, "feature_cache") or not any(p.kind == "features" for p in programs(runtime)):
        say(f"{files.name} transfer: left out, as this version makes no `features` program or has no cache for it")
        return []
    x, y = files.data(files.case.examples)
    ends = {}

    def learn(name: str, cache: bool) -> None:
        runtime.reset("parameters")
        runtime.reset("state")
        runtime.fit(x, y, epochs=epochs, batch_size=batch, seed=0, hyperparameters={"lr": 0.01}, feature_cache=cache)
        ends[name] = np.concatenate([array.ravel() for array in runtime.parameters().values()])

    times: dict[str, list[float]] = {OURS: [], "without the feature cache": []}
    for _ in range(rounds):
        for name, values in times.items():
            started = time.perf_counter()
            learn(name, name == OURS)
            values.append(time.perf_counter() - started)
    difference = float(np.abs(np.subtract(*ends.values())).max())
    say(f"{files.name} transfer: weights with and without the cache differ by at most {difference:.2g}")
    return compare("lite", f"{files.name} transfer, {threads} thread{'s' * (threads > 1)}", OURS, times, "s")


def programs(runtime: Any) -> list[Any]:
    return list(runtime.bundle.manifest.programs.values())
