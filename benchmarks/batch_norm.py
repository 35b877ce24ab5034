"""BatchNormalization in a federation: where its running statistics are, and what a model measured centrally is worth.

    python benchmarks/batch_norm.py            about a minute
    python benchmarks/batch_norm.py --quick    fewer rounds, a quarter of that
    python benchmarks/batch_norm.py --json     one JSON object a row

Eight devices with digits of the shipped ones, of classes that differ much (Dirichlet, 0.3), train a small convolutional
network by federated averaging. Every update goes through the fixed-point encoding and the server's step. Rows:

    averaged       running statistics travel in the secure sum (`batch_norm="train"`)
    stay           as in fedbn they stay on the devices; centrally the model has those that it began with
    frozen         `batch_norm="frozen"`: everybody normalizes with those that the model began with
    group norm     the same network with group normalization, which has no running statistics
    PyTorch        the reference: the same steps on the same batches in PyTorch, weights and statistics averaged

`central` is the loss on digits of nobody's device, `devices` the mean loss of the devices on their own digits, each
with the statistics that it has.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent))
from measure import arguments, print_alone, state_run

from archipel import simulate
from archipel.converter import Training
from archipel.datasets import digits_by_writer
from archipel.lite_runtime import DeviceState, Runtime
from archipel.permutations import permutation
from archipel.simulation.draws import device_seed
from archipel.simulation.saved import STATES
from archipel.simulation.states import StateFolder
from archipel.training import losses, optimizers

DEVICES, BATCH, LR, ALPHA = 8, 16, 0.05, 0.3
EXAMPLES, HELD_OUT = 2000, 1000
Data = tuple[np.ndarray, np.ndarray]


@dataclass
class Row:
    case: str
    central: float
    accuracy: float
    devices: float


def network(normalize: Callable[[int], nn.Module] = nn.BatchNorm2d) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2), normalize(8), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), normalize(16), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * 36, 10),
    )  # fmt: skip


def split(seed: int = 0) -> tuple[list[Data], Data]:
    """Each device's digits, and those of nobody."""
    digits, rng = digits_by_writer(), np.random.default_rng(seed)
    order = rng.permutation(len(digits.targets()))
    x, y = digits.inputs()[order], digits.targets()[order].astype(np.int64)
    owned: list[list[int]] = [[] for _ in range(DEVICES)]
    for label in range(10):
        rows = np.flatnonzero(y[:EXAMPLES] == label)
        shares = np.cumsum(rng.dirichlet([ALPHA] * DEVICES))[:-1] * len(rows)
        for device, part in enumerate(np.split(rows, shares.astype(int))):
            owned[device] += part.tolist()
    # A batch of one example has no variance, in PyTorch neither.
    devices = [(x[rows], y[rows]) for rows in owned if len(rows) % BATCH != 1]
    return devices, (x[-HELD_OUT:], y[-HELD_OUT:])


def federated(devices: list[Data], held_out: Data, rounds: int, module: nn.Module, batch_norm: str, stay: bool) -> Row:
    """Rounds of all devices, and what the model is worth."""
    # A strategy that keeps tensors on the devices; here only the statistics.
    strategy, personal = ("fedper", {"personal": ["*running_mean", "*running_var"]}) if stay else ("fedavg", {})
    training = Training(
        losses.cross_entropy(), optimizers.sgd(lr=LR), batch_size=BATCH, strategy=strategy,
        step_options={"batch_norm": batch_norm},
        strategy_options={"clip": 100.0, "value_range": 1.0, "bits": 20, **personal},
    )  # fmt: skip
    clients = [{"input": x, "label": y} for x, y in devices]
    with tempfile.TemporaryDirectory() as folder:
        result = simulate(module, clients, training=training, rounds=rounds, folder=folder, client_axis="off")
        states = StateFolder(Path(folder) / STATES)

        def loss(data: Data, state: DeviceState) -> tuple[float, float]:
            runtime = Runtime(result.bundle, state=state)
            runtime.set_parameters(result.parameters)
            measured = runtime.evaluate(*data)
            return measured["loss"] / measured["count"], measured["correct"] / measured["count"]

        own = [loss(data, states.load(device, rounds + 1))[0] for device, data in enumerate(devices)]
        return Row("", *loss(held_out, DeviceState()), mean_loss(devices, own))


def mean_loss(devices: list[Data], own: list[float]) -> float:
    return float(np.average(own, weights=[len(y) for _, y in devices]))


def reference(devices: list[Data], rounds: int) -> nn.Module:
    """PyTorch: the mean of weights and statistics, weighted by min(examples, 100) as devices weigh."""
    module = network()
    for number in range(1, rounds + 1):
        start = {name: value.clone() for name, value in module.state_dict().items()}
        weights = np.array([min(len(y), 100) for _, y in devices], float)
        total = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in start.items()}
        for device, (x, y) in enumerate(devices):
            module.load_state_dict(start)
            module.train()
            optimizer = torch.optim.SGD(module.parameters(), lr=LR)
            order = permutation(len(y), device_seed(0, number, device), 0, 0)
            for first in range(0, len(y), BATCH):
                rows = order[first : first + BATCH]
                optimizer.zero_grad()
                nn.functional.cross_entropy(module(torch.tensor(x[rows])), torch.tensor(y[rows])).backward()
                optimizer.step()
            for name, value in module.state_dict().items():
                total[name] += weights[device] / weights.sum() * value.double()
        module.load_state_dict({name: value.to(start[name].dtype) for name, value in total.items()})
    return module.eval()


def torch_loss(module: nn.Module, data: Data) -> tuple[float, float]:
    with torch.no_grad():
        logits = module(torch.tensor(data[0]))
    labels = torch.tensor(data[1])
    return float(nn.functional.cross_entropy(logits, labels)), float((logits.argmax(1) == labels).double().mean())


def rows(rounds: int) -> Iterator[Row]:
    devices, held_out = split()
    groups: Callable[[int], nn.Module] = lambda channels: nn.GroupNorm(4, channels)  # noqa: E731
    cases = {
        "averaged": (network(), "train", False),
        "stay": (network(), "train", True),
        "frozen": (network(), "frozen", False),
        "group norm": (network(groups), "train", False),
    }
    for case, (module, batch_norm, stay) in cases.items():
        yield replace(federated(devices, held_out, rounds, module, batch_norm, stay), case=case)
    module = reference(devices, rounds)
    own = [torch_loss(module, data)[0] for data in devices]
    yield Row("PyTorch", *torch_loss(module, held_out), mean_loss(devices, own))


def main() -> None:
    parser = arguments(__doc__)
    options = parser.parse_args()
    state_run(options.json, ("numpy", "onnxruntime", "torch"))
    torch.set_num_threads(1)
    rounds = 5 if options.quick else 20
    if not options.json:
        print(f"{'statistics':>12}{'central':>10}{'accuracy':>10}{'devices':>10}")
    for row in rows(rounds):
        if options.json:
            print_alone("batch_norm", f"{row.case}, {rounds} rounds", central_loss=row.central,
                        central_accuracy=row.accuracy, device_loss=row.devices)  # fmt: skip
        else:
            print(f"{row.case:>12}{row.central:>10.3f}{row.accuracy:>10.3f}{row.devices:>10.3f}", flush=True)


if __name__ == "__main__":
    main()
