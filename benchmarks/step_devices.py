"""A training step against other engines for devices, each in an environment and a process of its own.

Forward, backward and SGD with momentum, float32, batch 32, two threads, in turns with pauses between them. All begin
with the same weights and learn from the same minibatches for ten steps first: told is a peer's largest difference of a
loss from ours (relative, for losses below 1 absolute), or what stands in its way. Where the kernel pack is installed a
second row has our step with it. Memory is the peak of a whole process, its libraries included.

    python benchmarks/step_devices.py --install-peers           once: environments below .cache/peers, about 6 GB
    python benchmarks/step_devices.py                           every network and peer
    python benchmarks/step_devices.py --quick                   one network, what is installed: under a minute
    python benchmarks/step_devices.py --only LSTM --peer jax
    python benchmarks/step_devices.py --threads 1 --processor-time      on a machine that others use as well
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from engines import Trainer, difference
from jobs import write_values
from lite_peers import DEFAULT_FOLDER, PeerError, install, python_of
from measure import Report, Row, arguments
from step_cases import CASES, Case, data, network

STEPS, BATCHES = 10, 4
RATE, MOMENTUM = 0.005, 0.9
TOLERANCE = {"MobileNetV2": 5e-2}
"""Of losses, where 1e-4 is too little: statistics of minibatches in 52 layers, one on the other, let rounding grow."""
QUICK = ("LeNet",)
OURS, NATIVE = "onnxruntime", "native"
NOT_TRIED = {
    ("executorch", "LSTM"): "not tried: torch.export unrolls the time steps, for minutes",
    ("executorch", "MobileNetV2"): "not tried: a step of ResNet-8 takes 2.5 s already",
    ("mnn", "LSTM"): "its Python API casts the inputs of matmul, sigmoid and tanh, and a cast has no gradient",
    ("mnn", "Transformer"): "its Python API casts the inputs of matmul, and a cast has no gradient",
}
PAUSE = 0.1
"""Seconds between two engines' turns: ONNX Runtime's threads look for more work for 26 ms after a call."""


@dataclass(frozen=True)
class Peer:
    """An engine's `name`, what pip installs for it and its `ways` to run, of which the fastest counts."""

    name: str
    packages: tuple[str, ...]
    ways: tuple[dict[str, str], ...] = field(default=({},))
    momentum: float = MOMENTUM


PEERS = {
    "ort": Peer("ONNX Runtime Training", ("onnxruntime-training==1.19.2", "onnx==1.16.2", "numpy<2"), momentum=0),
    "litert": Peer("LiteRT", ("ai-edge-litert==2.3.0", "tensorflow-cpu==2.21.0", "numpy")),
    "executorch": Peer("ExecuTorch", ("torch==2.13.0", "executorch==1.5.1", "numpy")),
    "mnn": Peer("MNN", ("MNN==3.6.1", "numpy")),
    "jax": Peer("JAX", ("jax==0.10.2", "numpy"), ({"LAYOUT": "last"}, {"LAYOUT": "first"})),
}


def write_job(name: str, batch: int, momentum: float, folder: Path) -> None:
    """The step graph; for other engines the forward graph or the network's name and weights; and minibatches."""
    import torch

    from archipel import Model, training

    case = CASES[name]
    model = Model.from_torch(network(case).train(), data(case, 2)[0])
    loss = training.losses.cross_entropy(axis=-1) if case.vocabulary else training.losses.cross_entropy()
    for file, kernels in (("native", True), ("step", False)):
        step = training.step_graph(model, loss, training.optimizers.sgd(momentum=momentum), kernels=kernels)
        step.save(folder / f"{file}.onnx")
    values = {key: value.numpy() for key, value in network(case).state_dict().items() if value.dtype == torch.float32}
    np.savez(folder / "weights.npz", **values)
    settings = {"steps": STEPS, "network": case.make, "classes": case.classes, "rate": RATE, "momentum": momentum}
    write_values(step, RATE, (data(case, batch, index) for index in range(BATCHES)), folder, **settings)
    if not momentum:
        _export(network(case).train(), torch.from_numpy(data(case, batch)[0]), folder / "forward.onnx")


def _export_training(case: Case, batch: int, path: Path) -> None:
    """The joint graph of loss and gradients, for ExecuTorch, of operators that it has.

    It has no gradient of batch normalization and of convolutions along one axis, and that of max_pool2d adds to memory
    that it does not clear (1.5.1): here they are of other operators.
    """
    import torch
    from torch._decomp import get_decompositions
    from torch.export.experimental import _export_forward_backward
    from torch.nn import functional

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network(case).train()

        def forward(self, x: Any, y: Any) -> Any:
            return functional.cross_entropy(self.net(x).flatten(0, -2), y.flatten())

    def pool(x: Any, *_: Any, **__: Any) -> Any:
        for axis in range(2, x.ndim):
            x = x.unflatten(axis, (-1, 2)).amax(axis + 1)
        return x

    def conv1d(x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Any:
        options = ((1, *stride), (0, *padding), (1, *dilation), groups)
        return functional.conv2d(x.unsqueeze(2), weight.unsqueeze(2), bias, *options).squeeze(2)

    def norm(
        x: Any, mean: Any, var: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float
    ) -> Any:  # fmt: skip
        axes, count = [0, *range(2, x.ndim)], x.numel() // x.shape[1]
        now = x.mean(axes, keepdim=True)
        centred = x - now
        spread = (centred * centred).mean(axes, keepdim=True)
        mean.mul_(1 - momentum).add_(now.detach().flatten(), alpha=momentum)
        var.mul_(1 - momentum).add_(spread.detach().flatten(), alpha=momentum * count / (count - 1))
        shape = [-1, *(1,) * len(axes[1:])]
        return centred * (spread + eps).rsqrt() * weight.reshape(shape) + bias.reshape(shape)

    aten = torch.ops.aten
    missing = (aten.embedding_dense_backward, aten.native_layer_norm_backward, aten.gelu_backward)
    instead = {"max_pool1d": pool, "max_pool2d": pool, "conv1d": conv1d, "batch_norm": norm}
    x, y = (torch.from_numpy(array) for array in data(case, batch))
    attention = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with mock.patch.multiple(functional, **instead), attention:
        joint = _export_forward_backward(torch.export.export(Loss(), (x, y)))
    torch.export.save(joint.run_decompositions(get_decompositions(missing)), path)


def _export(net: Any, x: Any, path: Path) -> None:
    """By PyTorch's exporter; ONNX Runtime Training has no gradient of LayerNormalization, which comes with opset 17."""
    import torch

    class Flat(torch.nn.Module):
        """Logits [examples, classes] of texts, too, as its loss reads them."""

        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Any) -> Any:
            return self.net(x).flatten(0, -2)

    mode = torch.onnx.TrainingMode.TRAINING
    texts = x.dtype == torch.int64
    torch.onnx.export(
        Flat() if texts else net, (x,), str(path), training=mode, do_constant_folding=False, opset_version=15,
        export_params=True, keep_initializers_as_inputs=False, dynamo=False,
    )  # fmt: skip


def started(peer: str, name: str, folder: Path, options: argparse.Namespace) -> Trainer:
    """The peer's process in the fastest of its ways. Raises PeerError with what stands in the way."""
    python = python_of(options.peers, f"step-{peer}", "benchmarks/step_devices.py")
    if (peer, name) in NOT_TRIED:
        raise PeerError(NOT_TRIED[peer, name])
    if peer == "executorch":
        _export_training(CASES[name], options.batch, folder / "train.pt2")
    trained: list[Trainer] = []
    failure = ""
    for way in PEERS[peer].ways:
        settings = way | {"NPROC": str(options.threads)}
        trainer = Trainer(peer, folder, python, f"train_{peer}.py", options.threads, settings)
        if trainer.failure:
            failure = trainer.failure
            trainer.close()
        else:
            trained.append(trainer)
    if not trained:
        raise PeerError(failure)
    times = in_turns(trained, 1.0, options) if len(trained) > 1 else {trained[0]: [0.0]}
    best = min(trained, key=lambda each: statistics.median(times[each]))
    for trainer in trained:
        if trainer is not best:
            trainer.close()
    return best


def in_turns(trainers: list[Trainer], seconds: float, options: argparse.Namespace) -> dict[Trainer, list[float]]:
    """Milliseconds a step, in rounds in which each has its turn, for about `seconds` each without the pauses."""
    times: dict[Trainer, list[float]] = {trainer: [] for trainer in trainers}
    spent = 0.0
    while spent < seconds * len(trainers) or len(times[trainers[0]]) < 5:
        for trainer in trainers:
            time.sleep(PAUSE)
            began = time.perf_counter()
            times[trainer].append(trainer.milliseconds(options.processor_time))
            spent += time.perf_counter() - began + PAUSE / 4
    return times


def measure(name: str, peers: list[str], options: argparse.Namespace, folder: Path) -> Iterator[Row | str]:
    """The rows of one network beside peers with the same optimizer, and sentences where a peer has none."""
    momentum = PEERS[peers[0]].momentum
    title = f"{name} batch {options.batch}" + ", plain SGD" * (not momentum)
    write_job(name, options.batch, momentum, folder)
    mine = {"": Trainer(OURS, folder, threads=options.threads)}
    if _has_pack():
        mine[", kernel pack"] = Trainer(NATIVE, folder, threads=options.threads)
    running: dict[str, Trainer] = {}
    try:
        for form, trainer in mine.items():
            if trainer.failure:
                raise SystemExit(f"{title}{form}: {trainer.failure}")
        for peer in peers:
            try:
                running[peer] = started(peer, name, folder, options)
            except PeerError as error:
                yield f"{title}: {PEERS[peer].name}: {error}"
                continue
            far = difference(running[peer].losses, mine[""].losses)
            fails = not far <= TOLERANCE.get(name, 1e-4)
            yield f"{title}: {PEERS[peer].name}: losses differ by {far:.1e}" + ", too far to compare" * fails
            if fails:
                running.pop(peer).close()
        if running:
            times = in_turns([*mine.values(), *running.values()], options.seconds, options)
            for form, trainer in mine.items():
                yield from rows(title + form, trainer, running, times)
    finally:
        for trainer in (*mine.values(), *running.values()):
            trainer.close()


def rows(case: str, ours: Trainer, running: dict[str, Trainer], times: dict[Trainer, list[float]]) -> Iterator[Row]:
    for peer, trainer in running.items():
        name = PEERS[peer].name
        mine, theirs = (statistics.median(times[each]) for each in (ours, trainer))
        ratio = statistics.median(a / b for a, b in zip(times[ours], times[trainer]))
        yield Row("step devices", case, mine, theirs, name, ratio, "ms")
        yield Row(
            "step devices memory", case, ours.megabytes, trainer.megabytes, name,
            ours.megabytes / trainer.megabytes, "MB",
        )  # fmt: skip


def _has_pack() -> bool:
    from archipel.lite_runtime.engines.kernels import kernel_pack

    return kernel_pack().library is not None


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", action="append", choices=CASES, help="only this network; can be repeated")
    parser.add_argument("--peer", action="append", choices=PEERS, help="only this peer; can be repeated")
    parser.add_argument("--batch", type=int, default=32, help="examples in a minibatch")
    parser.add_argument("--threads", type=int, default=2, help="of each engine")
    parser.add_argument("--processor-time", action="store_true", help="of each process; waiting does not count")
    parser.add_argument("--seconds", type=float, default=3.0, help="time for each engine and network")
    parser.add_argument("--peers", type=Path, default=DEFAULT_FOLDER, help="the folder of the engines' environments")
    parser.add_argument("--install-peers", action="store_true", help="make these environments first")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if options.install_peers:
        for peer in options.peer or PEERS:
            install(options.peers, f"step-{peer}", PEERS[peer].packages)
    if options.quick:
        options.seconds = 0.6
    report = Report(options.json, ("numpy", "onnxruntime", *(("archipel-kernels",) if _has_pack() else ())))
    chosen = options.peer or list(PEERS)
    groups = [[peer for peer in chosen if bool(PEERS[peer].momentum) == momentum] for momentum in (True, False)]
    for name in options.only or (QUICK if options.quick else CASES):
        for peers in filter(None, groups):
            with tempfile.TemporaryDirectory() as folder:
                for found in measure(name, peers, options, Path(folder)):
                    if isinstance(found, Row):
                        report.add([found])
                    else:
                        print(found, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
