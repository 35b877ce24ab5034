"""The networks of the runtime's benchmarks and every file made of them: bundles, ONNX files for peers, inputs."""

from __future__ import annotations

import hashlib
import inspect
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

SEED = bytes(range(32))
"""The publisher's key: a constant, as nothing here is published."""


@dataclass(frozen=True)
class Case:
    """A network of the zoo, the shape of one example, its number of classes and where its head begins."""

    make: str
    shape: tuple[int, ...]
    classes: int
    head: str = "output.*"
    examples: int = 512


CASES = {
    "MLP": Case("mlp", (784,), 10),
    "LeNet": Case("lenet", (1, 28, 28), 10),
    "FedAvg CNN": Case("fedavg_cnn", (1, 28, 28), 10),
    "ResNet-8": Case("resnet8", (3, 32, 32), 10),
    "DS-CNN": Case("ds_cnn", (1, 49, 10), 12),
    "MobileNetV2": Case("mobilenet_v2", (3, 32, 32), 10, examples=256),
    "1D-CNN": Case("cnn_1d", (6, 128), 6),
}


class Files:
    """One network's files, each made when first asked for.

    Bundles go below `folder`; what does not depend on this project's converter, and takes other engines' converters
    long, below `kept`, under a name that changes with the network's definition.
    """

    def __init__(self, name: str, folder: Path, kept: Path) -> None:
        self.name = name
        self.case = CASES[name]
        self.bundles = folder / self.case.make
        self.folder = kept / f"{self.case.make}-{_digest(self.case.make)}"
        for path in (self.bundles, self.folder):
            path.mkdir(parents=True, exist_ok=True)

    @property
    def keys(self) -> list[bytes]:
        return [_key().public_key().public_bytes_raw()]

    def data(self, count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Standard normal examples float32 [count, *shape] and labels int64 [count]."""
        rng = np.random.default_rng(seed)
        return rng.standard_normal((count, *self.case.shape), np.float32), rng.integers(0, self.case.classes, count)

    @cached_property
    def state(self) -> Path:
        """The network's state_dict, with the statistics of `calibration` in its BatchNormalization.

        With the statistics of a new network activations fade from layer to layer, and no output would depend on
        the input enough to compare engines by.
        """
        import torch

        path = self.folder / "state.pt"
        if not path.exists():
            network = _new(self.case.make).train()
            for module in network.modules():
                if isinstance(module, torch.nn.BatchNorm2d):
                    module.momentum = None
            with torch.no_grad():
                network(torch.from_numpy(np.load(self.calibration)))
            torch.save(network.state_dict(), path)
        return path

    def network(self) -> Any:
        import torch

        network = _new(self.case.make)
        network.load_state_dict(torch.load(self.state, weights_only=True))
        return network

    @cached_property
    def bundle(self) -> Path:
        """Predicts in float."""
        return self._converted("float", evaluating=True)

    @cached_property
    def int8(self) -> Path:
        """Predicts in int8, calibrated on `calibration`."""
        from archipel.compression import StaticInt8
        from archipel.converter import Compression

        return self._converted(
            "int8",
            evaluating=True,
            compression=Compression([StaticInt8(examples=64)], calibration={"input": np.load(self.calibration)}),
            # Answers of a network that has learned nothing hardly differ between examples.
            min_snr=-100,
        )

    def train(self, batch: int) -> Path:
        """Trains everything with SGD and momentum, in batches of `batch`."""
        return self._converted(f"train-{batch}", training=_learning(batch))

    def transfer(self, batch: int) -> Path:
        """Trains the last layer on top of a frozen rest."""
        frozen = {"trainable": self.case.head, "step_options": {"batch_norm": "frozen"}}
        return self._converted(f"transfer-{batch}", training=_learning(batch, **frozen))

    @cached_property
    def onnx(self) -> Path:
        """What other engines read: PyTorch's own export for a batch of one, BatchNormalization folded.

        Means over pictures become GlobalAveragePool, which MNN's quantizer knows, and OpenVINO and LiteRT as well.
        """
        import onnx
        import torch

        path = self.folder / "model.onnx"
        if not path.exists():
            with quiet():
                example = torch.zeros(1, *self.case.shape)
                torch.onnx.export(
                    self.network().eval(), (example,), path, dynamo=True, external_data=False, verbose=False
                )
            graph = onnx.load(path)
            for node in graph.graph.node:
                if node.op_type == "ReduceMean":
                    node.op_type = "GlobalAveragePool"
                    del node.input[1:], node.attribute[:]
            onnx.save(graph, path)
        return path

    @cached_property
    def inputs(self) -> Path:
        """16 examples; the first is what is timed."""
        return self._array("inputs.npy", self.data(16, seed=1)[0])

    @cached_property
    def calibration(self) -> Path:
        """64 examples, the same for every engine."""
        return self._array("calibration.npy", self.data(64, seed=2)[0])

    def _array(self, name: str, array: np.ndarray) -> Path:
        path = self.folder / name
        np.save(path, array)
        return path

    def _converted(self, kind: str, evaluating: bool = False, **options: Any) -> Path:
        from archipel.converter import Signing, convert

        path = self.bundles / kind
        if not path.exists():
            network = self.network()
            with quiet():
                convert(
                    network.eval() if evaluating else network.train(),
                    path,
                    example=self.data(2)[0],
                    signing=Signing(_key()),
                    name=self.case.make,
                    **options,
                )
        return path


def loaded(files: Files, bundle: Path, threads: int, **options: Any) -> Any:
    from archipel import lite_runtime

    return lite_runtime.load(bundle, files.keys, threads=threads, **options)


def takes(function: Any, argument: str) -> bool:
    return argument in inspect.signature(function).parameters


def _new(make: str) -> Any:
    from archipel import models

    return getattr(models, make)(0)


def _digest(make: str) -> str:
    from archipel import models

    source = Path(models.__file__).with_name(f"{make}.py").read_bytes()
    return hashlib.sha256(source + Path(__file__).read_bytes()).hexdigest()[:12]


def _learning(batch: int, **options: Any) -> Any:
    from archipel import training
    from archipel.converter import Training

    return Training(training.losses.cross_entropy(), training.optimizers.sgd(momentum=0.9), batch_size=batch, **options)


def _key() -> Any:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(SEED)


@contextmanager
def quiet() -> Iterator[None]:
    """Exporters talk a lot, and warn about what is none of a benchmark's business."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
