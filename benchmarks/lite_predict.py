"""`predict` at batch 1 against ONNX Runtime without us, PyTorch, LiteRT, OpenVINO and MNN, interleaved."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from lite_models import Files, loaded
from lite_peers import NAMES, Peer, PeerError, convert
from measure import Row, compare

OURS = "archipel"
BLOCK = 0.03
"""Seconds that an engine gets in one round."""
FLOAT_TOLERANCE = 1e-3
TRIAL_CALLS = 50
"""Predictions by which the faster of PyTorch's memory layouts is found."""


@dataclass
class Runner:
    """An engine with a model: what it answers to the 16 examples, and its median seconds a call over `calls`."""

    name: str
    outputs: Callable[[], np.ndarray]
    seconds: Callable[[int], float]


def in_process(name: str, predict: Callable[[np.ndarray], np.ndarray], inputs: np.ndarray) -> Runner:
    from peers.serve import seconds

    class Model:
        def predict(self, x: np.ndarray) -> np.ndarray:
            return predict(x)

    def outputs() -> np.ndarray:
        return np.concatenate([predict(x[None]) for x in inputs])

    model = Model()
    model.predict = predict  # type: ignore[method-assign]  # no frame of ours around what is timed
    x = inputs[:1].copy()
    return Runner(name, outputs, lambda calls: seconds(model, x, calls))  # type: ignore[arg-type]


def raw_session(path: Path, threads: int, **settings: Any) -> Any:
    """ONNX Runtime alone on the same graph file, with the runtime's thread settings."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4
    for name, value in settings.items():
        setattr(options, name, value)
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def raw_run(session: Any) -> Callable[[np.ndarray], np.ndarray]:
    names, port = [output.name for output in session.get_outputs()], session.get_inputs()[0].name
    run = session.run
    return lambda x: run(names, {port: x})[0]


def raw_bound(session: Any, shape: tuple[int, ...]) -> Callable[[np.ndarray], np.ndarray]:
    """I/O binding: the input is copied into a bound buffer and the answer out of one, so arrays go in and come out."""
    import onnxruntime as ort

    x = np.zeros(shape, np.float32)
    y = np.zeros_like(session.run(None, {session.get_inputs()[0].name: x})[0])
    kept = [ort.OrtValue.ortvalue_from_numpy(array) for array in (x, y)]
    binding = session.io_binding()
    binding.bind_ortvalue_input(session.get_inputs()[0].name, kept[0])
    binding.bind_ortvalue_output(session.get_outputs()[0].name, kept[1])
    run, into = session.run_with_iobinding, kept[0].update_inplace

    def predict(given: np.ndarray) -> np.ndarray:
        into(given)
        run(binding)
        return y.copy()

    return predict


class Peers:
    """The processes of one thread setting, started when first asked for; one that fails is named once and left out."""

    def __init__(self, folder: Path, logs: Path, wanted: Iterable[str]) -> None:
        self._folder = folder
        self._logs = logs
        self._wanted = list(wanted)
        self._running: dict[tuple[str, str], Peer] = {}

    def runners(self, files: Files, threads: int, int8: bool) -> Iterator[Runner]:
        """The engines that can run this network; one that cannot is named and left out."""
        for name in list(self._wanted):
            kinds = ["int8"] if int8 else ["eager", "jit"] if name == "torch" else ["float"]
            if int8 and name == "torch":
                continue
            for kind in kinds:
                try:
                    if name == "torch":
                        yield self._faster_layout(kind, files, threads)
                    else:
                        yield self._runner(name, kind, files, threads, NAMES[name])
                except PeerError as error:
                    say(f"{files.name}: without {NAMES[name]} {kind}: {error}")
                    if "not installed" in str(error):
                        self._wanted.remove(name)

    def _faster_layout(self, form: str, files: Files, threads: int) -> Runner:
        """PyTorch with images in the memory layout that is faster, each tried in a process of its own."""
        shown = f"{NAMES['torch']} {form}"
        tried = {
            kind: self._runner("torch", kind, files, threads, shown)
            for kind in [form, *([f"{form}, channels_last"] if len(files.case.shape) == 3 else [])]
        }
        best = min(tried, key=lambda kind: tried[kind].seconds(TRIAL_CALLS))
        for kind in tried:
            if kind != best:
                self._running.pop(("torch", kind)).close()
        return tried[best]

    def _runner(self, name: str, kind: str, files: Files, threads: int, shown: str) -> Runner:
        log = self._logs / f"{name}.log"
        convert(name, kind, files, self._folder, log)
        # PyTorch has a process for each kind; the other engines' kinds are files of their own.
        key = (name, kind if name == "torch" else "")
        peer = self._running.get(key)
        if peer is None:
            peer = self._running[key] = Peer(name, self._folder, log)
        try:
            version = peer.load(kind, files, threads)
        except PeerError:
            self._running.pop(key).close()
            raise
        return Runner(f"{shown} {version}", lambda: peer.outputs(kind), lambda calls: peer.seconds(kind, calls))

    def close(self) -> None:
        for peer in self._running.values():
            peer.close()


def predict_rows(files: Files, threads: int, int8: bool, peers: Peers, rounds: int) -> list[Row]:
    """Rows in microseconds. A peer whose answers differ from ours is named and left out."""
    bundle = files.int8 if int8 else files.bundle
    inputs = np.load(files.inputs)
    runtime = loaded(files, bundle, threads)
    path = bundle / "predict.onnx"
    kinds = [
        in_process(OURS, runtime.predict, inputs),
        in_process("ONNX Runtime", raw_run(raw_session(path, threads)), inputs),
        in_process("ONNX Runtime bound", raw_bound(raw_session(path, threads), (1, *files.case.shape)), inputs),
    ]
    reference = kinds[0].outputs()
    exact = loaded(files, files.bundle, threads)
    truth = np.concatenate([exact.predict(x[None]) for x in inputs])
    if int8:
        say(f"{files.name} int8: {OURS} is {apart(reference, truth):.3f} from float")
    for runner in peers.runners(files, threads, int8):
        theirs = runner.outputs()
        if int8:
            say(f"{files.name} int8: {runner.name} is {apart(theirs, truth):.3f} from float")
        elif not np.allclose(theirs, reference, rtol=FLOAT_TOLERANCE, atol=FLOAT_TOLERANCE * np.abs(reference).max()):
            say(f"{files.name}: without {runner.name}: its answers are {apart(theirs, reference):.3g} from ours")
            continue
        kinds.append(runner)
    times = timed(kinds, rounds)
    for name, values in times.items():
        low, _, high = statistics.quantiles(values, n=4)
        if high > 1.5 * low:
            say(f"{files.name}, {threads} threads: {name} took from {low:.0f} to {high:.0f} us: the machine is busy")
    case = f"{files.name} predict" + (" int8" if int8 else "") + f", {threads} thread{'s' * (threads > 1)}"
    return compare("lite", case, OURS, times, "us")


def timed(runners: list[Runner], rounds: int, block: float = BLOCK) -> dict[str, list[float]]:
    """Microseconds a call by name, one number a round: all engines take their turn in every round, in turning order.

    Threads of an engine may look for work for a while after its last call, so each waits a little before it starts.
    """
    calls = {runner.name: max(5, min(2000, int(block / runner.seconds(5)))) for runner in runners}
    times: dict[str, list[float]] = {runner.name: [] for runner in runners}
    for index in range(rounds):
        start = index % len(runners)
        for runner in runners[start:] + runners[:start]:
            time.sleep(0.003)
            times[runner.name].append(runner.seconds(calls[runner.name]) * 1e6)
    return times


def apart(a: np.ndarray, b: np.ndarray) -> float:
    """The norm of the difference, relative to that of `b`."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def say(text: str) -> None:
    print(text, file=sys.stderr)
