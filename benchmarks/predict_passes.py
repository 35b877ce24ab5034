"""What the passes for prediction change: each network's graph as imported against what they make of it, at batch 1.

On one thread of ONNX Runtime with its own optimizations on, interleaved in one process: microseconds a call,
milliseconds to build a session, bytes of the file. With --without each pass is left out in turn, so that the rows say
what it alone brings.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from lite_models import quiet
from measure import Report, Row, arguments, compare, interleave

BLOCK = 20
"""Calls that are timed together."""


@dataclass(frozen=True)
class Case:
    make: str
    shape: tuple[int, ...]
    options: tuple[tuple[str, Any], ...] = ()


CASES = {
    "MLP": Case("mlp", (784,)),
    "LeNet": Case("lenet", (1, 28, 28)),
    "FedAvg CNN": Case("fedavg_cnn", (1, 28, 28)),
    "ResNet-8": Case("resnet8", (3, 32, 32)),
    "DS-CNN": Case("ds_cnn", (1, 49, 10)),
    "MobileNetV2": Case("mobilenet_v2", (3, 32, 32)),
    "1D-CNN": Case("cnn_1d", (6, 128)),
    "Autoencoder": Case("autoencoder", (1, 28, 28)),
    "U-Net": Case("unet", (1, 32, 32)),
    "LSTM": Case("char_rnn", (80,), (("hidden", 64),)),
    "GRU": Case("char_rnn", (80,), (("cell", "gru"), ("hidden", 64))),
    "Transformer": Case("transformer", (64,)),
}
QUICK = ("DS-CNN", "1D-CNN", "LSTM")


def imported(case: Case) -> tuple[Any, np.ndarray]:
    """The network as a Model, and one example."""
    import torch

    from archipel import Model, models

    rng = np.random.default_rng(0)
    sequence = len(case.shape) == 1 and case.make != "mlp"
    shape = (2, *case.shape)
    x = rng.integers(0, 80, shape) if sequence else rng.standard_normal(shape, np.float32)
    with quiet():
        network = getattr(models, case.make)(0, **dict(case.options))
        return Model.from_torch(network, torch.from_numpy(x)), x[:1]


def original(model: Any) -> bytes:
    from archipel.training.batch_norm import prepared

    data: bytes = prepared(model, "frozen").to_bytes()
    return data


def optimized(model: Any) -> bytes:
    """What a bundle gets: optimized, and what parameters alone decide computed."""
    from archipel.compression.deploy import deploy

    data: bytes = deploy(model).predict.to_bytes()
    return data


@contextmanager
def without(name: str) -> Iterator[None]:
    """Leave one pass out for a while."""
    from archipel.graph.passes import inference

    passes, fold = inference.PASSES, inference.fold_shapes
    inference.PASSES = tuple(change for change in passes if type(change).__name__ != name)
    if name == type(fold).__name__:
        inference.fold_shapes = inference.remove_dead_code  # which runs anyway
    try:
        yield
    finally:
        inference.PASSES, inference.fold_shapes = passes, fold


def variants(model: Any, ablate: bool) -> dict[str, bytes]:
    from archipel.graph.passes import inference

    found = {"optimized": optimized(model), "original": original(model)}
    for name in [type(change).__name__ for change in (*inference.PASSES, inference.fold_shapes)] if ablate else []:
        with without(name):
            data = optimized(model)
        if data != found["optimized"]:
            found[f"without {name}"] = data
    return found


def session(data: bytes) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def several(built: Any, feed: dict[str, np.ndarray]) -> Callable[[], None]:
    run, names = built.run, [output.name for output in built.get_outputs()]

    def calls() -> None:
        for _ in range(BLOCK):
            run(names, feed)

    return calls


def rows(name: str, seconds: float, ablate: bool) -> Iterator[Row]:
    model, x = imported(CASES[name])
    found = variants(model, ablate)
    sessions = {kind: session(data) for kind, data in found.items()}
    feed = {model.inputs[0].name: x}
    answers = {kind: built.run(None, feed)[0] for kind, built in sessions.items()}
    for kind, answer in answers.items():
        largest = np.abs(answers["original"]).max()
        if not np.allclose(answer, answers["original"], rtol=1e-3, atol=1e-3 * largest):
            raise SystemExit(f"{name}: {kind} answers differently")
    times = interleave({kind: several(built, feed) for kind, built in sessions.items()}, seconds)
    calls = {kind: [1e3 * value / BLOCK for value in values] for kind, values in times.items()}
    yield from compare("predict_passes", f"{name} predict", "optimized", calls, "us")
    both = {kind: found[kind] for kind in ("optimized", "original")}
    loads = interleave({kind: lambda data=data: session(data) for kind, data in both.items()}, min(seconds, 0.5), 1)
    yield from compare("predict_passes", f"{name} session", "optimized", loads, "ms")
    sizes = [len(data) / 1e3 for data in both.values()]
    yield Row("predict_passes", f"{name} file", sizes[0], sizes[1], "original", sizes[0] / sizes[1], "kB")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=CASES, help="one network")
    parser.add_argument("--without", action="store_true", help="leave each pass out in turn")
    options = parser.parse_args()
    report = Report(options.json, ("numpy", "onnxruntime", "torch"))
    started = time.perf_counter()
    for name in [options.only] if options.only else QUICK if options.quick else CASES:
        report.add(rows(name, 0.5 if options.quick else 2.0, options.without))
    if not options.json:
        print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
