"""Signed bundles with what the Python runtime and PyTorch make of them: python tests/make_fixtures.py

Writes fixtures/NAME.bundle, NAME.safetensors (data and expected arrays) and NAME.json (expected numbers), small enough
to be committed, so that the browser library's tests need no Python. The key is a test's: everyone knows it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import graph_corpus
import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from fixture_graphs import FIXTURES as WRITTEN
from fixture_graphs import PRIVACY, write
from make_vectors import byte_source

from archipel import Model, convert, training
from archipel import bundle as b
from archipel.compression import WeightOnly
from archipel.converter import Compression, Signing, Training
from archipel.converter.repeated import repeated
from archipel.graph.slim import slim
from archipel.lite_runtime import Runtime, load
from archipel.lite_runtime.shuffle import permutation

FOLDER = Path(__file__).with_name("fixtures")
KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key().public_bytes_raw()
STEPS = 50


def blobs(seed: int, count: int, shape: tuple[int, ...], classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Noisy class means: something that a small network learns within a few steps."""
    rng = np.random.default_rng(seed)
    means = rng.standard_normal((classes, *shape))
    y = rng.integers(0, classes, count)
    return (means[y] + 0.8 * rng.standard_normal((count, *shape))).astype(np.float32), y


def cnn() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.MaxPool2d(2), torch.nn.Flatten()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(64, 5))


def mlp() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))


def norm() -> torch.nn.Module:
    torch.manual_seed(2)
    return torch.nn.Sequential(
        torch.nn.Linear(10, 12),
        torch.nn.BatchNorm1d(12),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.3),
        torch.nn.Linear(12, 3),
    )


def uneven() -> torch.nn.Module:
    network = mlp()
    with torch.no_grad():
        # One weight far above the others makes the steps of 4 bits so coarse that rounding moves the loss.
        network[0].weight[0, 0] = 2.0
        network[2].weight[:, 0] = 1.5
    return network


def torch_losses(
    network: torch.nn.Module, x: np.ndarray, y: np.ndarray, batch: int, seed: int, lr: float, momentum: float
) -> list[float]:
    optimizer = torch.optim.SGD(network.parameters(), lr=lr, momentum=momentum)
    losses: list[float] = []
    epoch = 0
    while len(losses) < STEPS:
        order = permutation(len(x), seed, 0, epoch)
        for first in range(0, len(x), batch):
            rows = order[first : first + batch]
            loss = torch.nn.functional.cross_entropy(network(torch.from_numpy(x[rows])), torch.from_numpy(y[rows]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        epoch += 1
    return losses


def expected(
    path: Path, data: Mapping[str, np.ndarray], fit: Mapping[str, Any], round_: Mapping[str, Any]
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """What the Python runtime does with the bundle: predict, fit, evaluate, predict again; and one local round."""
    arrays: dict[str, np.ndarray] = {f"data/{name}": array for name, array in data.items()}
    numbers: dict[str, Any] = {"publicKey": PUBLIC.hex(), "fit": fit, "round": round_}
    rt = load(path, [PUBLIC], cache=path.parent)
    fields = {port.name for program in rt.bundle.manifest.programs.values() for port in program.inputs}
    x = {name: array for name, array in data.items() if name in fields}
    has_evaluate = any(program.kind == "evaluate" for program in rt.bundle.manifest.programs.values())
    examples = {port.name for port in rt.bundle.program("predict").inputs if type(port).__name__ == "Example"}
    asked = {name: x[name] for name in examples}
    arrays.update({f"before/{name}": array for name, array in rt.predict(asked).items()})
    broadcast = {name.removeprefix("broadcast/"): a for name, a in data.items() if name.startswith("broadcast/")}
    history = rt.fit(x, broadcast=broadcast, **fit)
    numbers["losses"] = history.losses
    numbers["examples"] = history.examples
    arrays.update({f"after/{name}": array for name, array in rt.predict(asked).items()})
    arrays.update({f"parameter/{name}": array for name, array in rt.parameters().items()})
    arrays.update({f"personal/{name}": array for name, array in rt.state.personal.items()})
    arrays.update({f"state/{name}": array for name, array in rt.state.state.items()})
    if has_evaluate:
        numbers["evaluate"] = rt.evaluate(x, batch_size=16)
    if any(program.kind == "finish" for program in rt.bundle.manifest.programs.values()):
        fresh: Runtime = load(path, [PUBLIC], cache=path.parent)
        for number in range(2):
            # Twice: the second round starts from the device's state that the first one left.
            update = fresh.local_round(x, broadcast=broadcast, randomness=byte_source(f"round {number}"), **round_)
            arrays.update({f"update{number}/{name}": array for name, array in update.arrays.items()})
            numbers[f"round{number}"] = {
                "losses": update.losses, "metrics": update.metrics, "steps": update.steps, "examples": update.examples,
            }  # fmt: skip
    return arrays, numbers


def converted(
    name: str, folder: Path, network: torch.nn.Module, x: np.ndarray, optimizer: Any, compression: Any = None,
    **more: Any,
) -> Path:  # fmt: skip
    path = folder / name
    convert(
        network, path, example=torch.from_numpy(x[:4]), compression=compression,
        training=Training(training.losses.cross_entropy(), optimizer, **more), privacy=PRIVACY, signing=Signing(KEY),
    )  # fmt: skip
    return path


def torch_loss(network: torch.nn.Module, parameters: Mapping[str, np.ndarray], x: np.ndarray, y: np.ndarray) -> float:
    """The sum of the examples' losses of the network in float, which a quantized `predict` is not."""
    network.load_state_dict({name: torch.tensor(array) for name, array in parameters.items()})
    answers = network(torch.from_numpy(x))
    return torch.nn.functional.cross_entropy(answers, torch.from_numpy(y), reduction="sum").item()


def with_more(path: Path, network: torch.nn.Module, x: np.ndarray, steps: int) -> Path:
    """The bundle with a program that repeats `train`, and with self-test vectors."""
    bundle = b.open_bundle(path, [PUBLIC])
    manifest = bundle.manifest
    model = Model.from_torch(network, torch.from_numpy(x[:4]))
    loss, optimizer = training.losses.cross_entropy(), training.optimizers.sgd(momentum=0.9)
    several = repeated(training.step_graph(model, loss, optimizer), steps)
    assert several.signature is not None
    signature = several.signature
    graphs = {file: (bundle.folder / file).read_bytes() for file in manifest.files if file.endswith(".onnx")}
    graphs["several.onnx"] = slim(several.ir).SerializeToString(deterministic=True)
    programs = dict(manifest.programs)
    programs["several"] = b.Program(
        kind="train", file="several.onnx", inputs=signature.inputs, outputs=signature.outputs, steps=steps,
        repeats="train",
    )  # fmt: skip
    with torch.no_grad():
        answers = network(torch.from_numpy(x[:4])).numpy()
    vectors = b.write_weights({"example/input": x[:4], "output/output": answers})
    test = b.SelfTest(file="self_test.safetensors", rtol=1e-3, atol=1e-4)
    target = path.with_name(f"{path.name}-more")
    b.write_bundle(
        target, name=manifest.name, programs=programs, graphs=graphs,
        weights=(bundle.folder / b.WEIGHTS_FILE).read_bytes(), parameters=manifest.parameters, limits=manifest.limits,
        privacy=manifest.privacy, key=KEY, schedule=manifest.schedule, strategy=manifest.strategy,
        lineage=manifest.lineage, self_test=(test, vectors),
    )  # fmt: skip
    return target


def keep(name: str, path: Path, arrays: Mapping[str, np.ndarray], numbers: Mapping[str, Any]) -> None:
    b.pack(path, FOLDER / f"{name}.bundle")
    (FOLDER / f"{name}.safetensors").write_bytes(b.write_weights({key: np.asarray(a) for key, a in arrays.items()}))
    (FOLDER / f"{name}.json").write_text(json.dumps(numbers, indent=1) + "\n")


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    graph_corpus.write()
    sgd = training.optimizers.sgd
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        x, y = blobs(1, 38, (1, 10, 10), 5)
        path = converted("cnn", folder, cnn(), x, sgd(), batch_size=8)
        fit = {"epochs": 10, "batch_size": 8, "seed": 7, "hyperparameters": {"lr": 0.05}}
        arrays, numbers = expected(path, {"input": x, "label": y}, fit, {"seed": 3, "hyperparameters": {"lr": 0.02}})
        numbers["torch"] = torch_losses(cnn(), x, y, 8, 7, 0.05, 0.0)
        keep("cnn", path, arrays, numbers)

        x, y = blobs(2, 60, (12,), 4)
        path = converted("mlp", folder, mlp(), x, sgd(momentum=0.9), batch_size=6)
        path = with_more(path, mlp(), x, 4)
        fit = {"epochs": 5, "batch_size": 6, "seed": 11, "hyperparameters": {"lr": 0.05}}
        arrays, numbers = expected(path, {"input": x, "label": y}, fit, {"seed": 4})
        numbers["torch"] = torch_losses(mlp(), x, y, 6, 11, 0.05, 0.9)
        keep("mlp", path, arrays, numbers)

        x, y = blobs(3, 40, (10,), 3)
        path = converted("norm", folder, norm(), x, sgd(), batch_size=8)
        fit = {"epochs": 10, "batch_size": 8, "seed": 5, "hyperparameters": {"lr": 0.1}}
        keep("norm", path, *expected(path, {"input": x, "label": y}, fit, {"seed": 6}))

        x, y = blobs(4, 60, (12,), 4)
        coarse = Compression([WeightOnly(bits=4, block_size=None, smallest=16)])
        path = converted("quantized", folder, uneven(), x, sgd(), compression=coarse, batch_size=6)
        fit = {"epochs": 5, "batch_size": 6, "seed": 2, "hyperparameters": {"lr": 0.05}}
        arrays, numbers = expected(path, {"input": x, "label": y}, fit, {"seed": 7})
        learned = {name.removeprefix("parameter/"): a for name, a in arrays.items() if name.startswith("parameter/")}
        numbers["floatLoss"] = torch_loss(uneven(), learned, x, y)
        keep("quantized", path, arrays, numbers)

        # Steps of DP-SGD, whose noise is drawn anew each time: no numbers to compare, only the data to train on.
        private = {"strategy": "dpsgd", "strategy_options": {"noise_multiplier": 1.0}}
        path = converted("private", folder, mlp(), x, sgd(), batch_size=6, **private)
        keep("private", path, {"data/input": x, "data/label": y}, {"publicKey": PUBLIC.hex(), "fit": fit})

        for name, make in WRITTEN.items():
            programs, parameters, tensors, schedule, data, fit, round_ = make()
            path = write(folder / name, name, programs, parameters, tensors, schedule, KEY)
            keep(name, path, *expected(path, data, fit, round_))
    total = sum(file.stat().st_size for file in FOLDER.iterdir())
    print(f"{FOLDER}: {total} bytes", file=sys.stderr)


if __name__ == "__main__":
    main()
