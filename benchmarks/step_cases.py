"""The networks of the step benchmarks, and one training step of each in ONNX Runtime and in PyTorch."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from measure import KEPT_MEMORY


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


def data(case: Case, batch: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    if case.vocabulary:
        x = rng.integers(0, case.vocabulary, (batch, *case.shape))
        return x, rng.integers(0, case.classes, (batch, *case.shape))
    return rng.standard_normal((batch, *case.shape), np.float32), rng.integers(0, case.classes, batch)


def network(case: Case) -> Any:
    from archipel import models

    return getattr(models, case.make)(0, **dict(case.options))


def step_file(case: Case, path: Path, kernels: bool = False) -> Any:
    """Writes the step graph; returns its Model. `kernels`: for the kernel pack."""
    from archipel import Model, training

    model = Model.from_torch(network(case).train(), data(case, 2)[0])
    loss = training.losses.cross_entropy(axis=-1) if case.vocabulary else training.losses.cross_entropy()
    step = training.step_graph(model, loss, training.optimizers.sgd(momentum=0.9), kernels=kernels)
    step.save(path)
    return step


def ours(
    step: Any, path: Path, x: np.ndarray, y: np.ndarray, threads: int, kernels: bool = False, profile: bool = False
) -> tuple[Callable[[], None], Any]:
    """A callable that runs one step, and its session; `kernels`: with the kernel pack, which must be installed."""
    import onnxruntime as ort

    from archipel.bundle.roles import Parameter, Personal, State
    from archipel.lite_runtime.engines.kernels import kernel_pack
    from archipel.training.driver import _initial as first_tensors
    from archipel.training.driver import _scalars as scalars_of

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    # As the Lite runtime sets them for training.
    options.enable_mem_pattern = options.enable_mem_reuse = False
    if kernels:
        kernel_pack().register(options, threads)
    if profile:
        options.enable_profiling = True
        options.profile_file_prefix = str(path.with_suffix(""))
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    # What a StepRunner begins with, without its session, whose memory would count here.
    tensors, every_scalar = first_tensors(step.program, step), scalars_of(step.program, {"lr": 1e-4})
    inputs = {p.tensor: p.name for p in step.signature.inputs if isinstance(p, Parameter | Personal | State)}
    outputs = {p.tensor: p.name for p in step.signature.outputs if isinstance(p, Parameter | Personal | State)}
    sets = [{name: ort.OrtValue.ortvalue_from_numpy(np.array(tensors[name])) for name in inputs} for _ in range(2)]
    fields = [p.name for p in step.signature.inputs if p.name not in inputs.values()]
    scalars = {name: value for name, value in every_scalar.items() if name in fields}
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


def torch_step(case: Case, x: np.ndarray, y: np.ndarray, compiled: bool, way: Way, threads: int) -> Callable[[], None]:
    import torch
    from torch.nn import functional

    torch.set_num_threads(threads)
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
