"""Training on a GPU: graphs as `TorchModule` against the PyTorch modules that they were made of, in one run.

ResNet-50 (batch 256, channels last), a decoder of 12 layers (GPT-2 small, sequences of 1,024 tokens), MobileNetV2, each
with bfloat16 autocast and SGD with momentum (fused), eager and with torch.compile; and the local training of 100
clients at once. Prints examples in a second of both sides and their ratio, the share of the matrix unit's speed that a
step reaches (FLOPs of the model over those of a large product, measured in the same run), and the memory at the peak.

    python benchmarks/gpu.py                  everything, under 8 minutes; without a GPU it says so and ends with 0
    python benchmarks/gpu.py --quick          eager rows only, under a minute
    python benchmarks/gpu.py --rows compiled  the networks compiled by torch.compile, nothing else
    python benchmarks/gpu.py --device cpu --tiny --quick     that the program runs, on a machine without a GPU
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cohort import ways
from measure import Report, Row, arguments, interleave, print_alone
from step_cases import CASES, network


@dataclass(frozen=True)
class Case:
    """A network: its constructor, the inputs of a batch, and whether these are pictures."""

    name: str
    make: Callable[[], Any]
    batch: int
    shape: tuple[int, ...]
    classes: int
    tokens: bool = False


def cases(tiny: bool) -> list[Case]:
    from archipel import models

    if tiny:
        small: dict[str, Any] = {"vocabulary": 100, "length": 32, "width": 32, "heads": 2, "layers": 2, "dropout": 0.0}
        return [
            Case("ResNet-50", lambda: models.resnet50(0, classes=10, width=8), 4, (3, 64, 64), 10),
            Case("GPT-2 small", lambda: models.gpt(0, **small), 2, (32,), 100, tokens=True),
            Case("MobileNetV2", lambda: models.mobilenet_v2(0, width=0.25), 8, (3, 32, 32), 10),
        ]
    return [
        Case("ResNet-50", lambda: models.resnet50(0), 256, (3, 224, 224), 1000),
        Case("GPT-2 small", lambda: models.gpt(0, dropout=0.0), 8, (1024,), 50257, tokens=True),
        Case("MobileNetV2", lambda: models.mobilenet_v2(0), 1024, (3, 32, 32), 10),
    ]


class Step:
    """One training step of a module, called as often as asked; counts what it takes."""

    def __init__(self, case: Case, module: Any, device: Any, compiled: bool) -> None:
        import torch

        self.case, self.device = case, device
        self.module = module.to(device).train()
        generator = torch.Generator().manual_seed(0)
        if case.tokens:
            self.x = torch.randint(case.classes, (case.batch, *case.shape), generator=generator).to(device)
            self.y = torch.randint(case.classes, (case.batch, *case.shape), generator=generator).to(device)
        else:
            self.module.to(memory_format=torch.channels_last)
            x = torch.randn((case.batch, *case.shape), generator=generator).to(device)
            self.x = x.contiguous(memory_format=torch.channels_last)
            self.y = torch.randint(case.classes, (case.batch,), generator=generator).to(device)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=1e-3, momentum=0.9, fused=True)
        self.run = torch.compile(self.module) if compiled else self.module

    def __call__(self) -> Any:
        import torch
        from torch.nn import functional

        with torch.autocast(self.device.type, torch.bfloat16):
            outputs = self.run(self.x)
            loss = functional.cross_entropy(outputs.reshape(-1, outputs.shape[-1]).float(), self.y.reshape(-1))
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        self.optimizer.step()
        return loss

    def seconds(self, repetitions: int) -> float:
        """Of one step, the device's work included."""
        wait(self.device)
        started = time.perf_counter()
        for _ in range(repetitions):
            self()
        wait(self.device)
        return (time.perf_counter() - started) / repetitions

    def flops(self) -> int:
        """Of one step, as PyTorch counts them."""
        from torch.utils.flop_counter import FlopCounterMode

        with FlopCounterMode(display=False) as counter:
            self()
        return int(counter.get_total_flops())


def main() -> int:
    options = parsed()
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print("no GPU that PyTorch can use: nothing to measure", file=sys.stderr)
        return 0
    device = torch.device(options.device)
    name = torch.cuda.get_device_name(0) if device.type == "cuda" else "CPU"
    report = Report(options.json, ("numpy", "torch"))
    peak = peak_flops(device, 512 if options.tiny else 8192)
    if not options.json:
        print(f"{name}: a product of bfloat16 matrices runs at {peak / 1e12:.1f} TFLOP/s")
    ends = time.perf_counter() + options.minutes * 60
    chosen = [case for case in cases(options.tiny) if not options.only or case.name in options.only]
    prepared = [(case, *modules(case)) for case in chosen]
    kinds = ("eager",) if options.quick else ("eager", "compiled")
    for kind in (kind for kind in kinds if options.rows in ("all", kind)):
        compiled = kind == "compiled"
        for case, native, ours in prepared:
            if time.perf_counter() > ends:
                print(f"{case.name}, {kind}: left out, {options.minutes:g} minutes are over", file=sys.stderr)
                continue
            report.add(compare(case, native, ours, device, compiled, peak, options))
        if kind == "eager" and not options.only:
            clients = 4 if options.tiny else 100
            report.add(cohort(clients, options.device))
            report.add(federation(clients, options.device))
    return 0


def cohort(clients: int, device: str) -> list[Row]:
    """Local steps of many clients at once: clients a second, ours beside each of PyTorch's ways."""
    times = interleave(ways("FedAvg CNN", clients, device), 3.0)
    ours = times.pop("lanes")
    return [
        Row(
            "gpu", f"cohort of {clients} clients", 1e3 * clients / statistics.median(ours),
            1e3 * clients / statistics.median(values), name,
            statistics.median(b / a for a, b in zip(ours, values)), "clients/s",
        )
        for name, values in times.items()
    ]  # fmt: skip


def federation(clients: int, device: str, rounds: int = 3) -> list[Row]:
    """FedAvg with the CNN of McMahan et al. 2017, an epoch of 60 batches of 10 of each client: seconds a round.

    Ours with exact sums, beside a loop in PyTorch with the data on the device.
    """
    import torch

    import archipel
    from archipel.simulation import SplitClients

    rng = np.random.default_rng(0)
    x, y = rng.random((clients * 600, 1, 28, 28), np.float32), rng.integers(0, 10, clients * 600)
    parts = np.array_split(rng.permutation(len(x)), clients)
    native, data = network(CASES["FedAvg CNN"]), SplitClients({"input": x, "label": y}, parts)
    x_there, y_there = torch.from_numpy(x).to(device), torch.from_numpy(y).to(device)
    rows_there = [torch.from_numpy(rows).to(device) for rows in parts]
    trained = copy.deepcopy(native).to(device)

    def ours(count: int) -> float:
        started = time.perf_counter()
        archipel.simulate(bundle, data, rounds=count, cohort=clients, client_axis="on", engine=f"torch:{device}")
        return time.perf_counter() - started

    def loop(count: int) -> float:
        started = time.perf_counter()
        model = {name: value.detach().clone() for name, value in trained.named_parameters()}
        for _ in range(count):
            total = {name: torch.zeros_like(value) for name, value in model.items()}
            for rows in rows_there:
                local_epoch(trained, model, x_there, y_there, rows, total)
            model = {name: value / clients for name, value in total.items()}
        wait(torch.device(device))
        return time.perf_counter() - started

    with tempfile.TemporaryDirectory() as folder:
        bundle = federated(native, torch.zeros(2, 1, 28, 28), Path(folder))
        ours(1), loop(1)
        # The difference: what a simulation does before its first round is not of a round.
        once, more = ours(1), ours(1 + rounds)
        seconds, theirs = (more - once) / rounds, loop(rounds) / rounds
    title = f"a round of {clients} clients"
    return [Row("gpu", title, seconds, theirs, "PyTorch loop", seconds / theirs, "s")]


def federated(native: Any, example: Any, folder: Path) -> Any:
    """A bundle that trains with FedAvg: SGD with batches of 10 for an epoch."""
    from archipel.bundle import generate_key, open_bundle
    from archipel.converter import Signing, Training, convert
    from archipel.training import losses, optimizers

    key, path = generate_key(), folder / "cnn.bundle"
    learning = Training(losses.cross_entropy(), optimizers.sgd(lr=0.05), strategy="fedavg", batch_size=10, epochs=1)
    convert(native, path, example=example, signing=Signing(key), training=learning)
    return open_bundle(path, [key.public_key().public_bytes_raw()], folder / "cache", allow_development=True)


def local_epoch(network: Any, start: Any, x: Any, y: Any, rows: Any, total: Any) -> None:
    """One client's epoch from `start`; its parameters go into `total`."""
    import torch

    parameters = dict(network.named_parameters())
    with torch.no_grad():
        torch._foreach_copy_(list(parameters.values()), list(start.values()))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, fused=True)
    for chosen in rows[torch.randperm(len(rows), device=rows.device)].split(10):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(x[chosen]), y[chosen]).backward()
        optimizer.step()
    with torch.no_grad():
        torch._foreach_add_(list(total.values()), list(parameters.values()))


def compare(
    case: Case, native: Any, ours: Any, device: Any, compiled: bool, peak: float, options: argparse.Namespace
) -> list[Row]:
    """Rows of one network: examples a second and memory, ours beside PyTorch's."""
    title = f"{case.name}, {'compiled' if compiled else 'eager'}"
    steps = {"PyTorch": Step(case, native, device, compiled), "archipel": Step(case, ours, device, compiled)}
    memory = {}
    for name, step in steps.items():
        memory[name] = warm(step, device)
    repetitions = max(1, round(0.2 / steps["PyTorch"].seconds(1)))
    rounds = 3 if options.quick else 10
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(step.seconds(repetitions))
    speeds = {name: case.batch / statistics.median(values) for name, values in times.items()}
    ratio = statistics.median(b / a for a, b in zip(times["archipel"], times["PyTorch"]))
    if not compiled:
        share = steps["archipel"].flops() / statistics.median(times["archipel"]) / peak
        if options.json:
            print_alone("gpu", title, share_of_peak=share)
        else:
            print(f"{title}: {100 * share:.1f} % of the speed of a large product")
    rows = [Row("gpu", title, speeds["archipel"], speeds["PyTorch"], "PyTorch", ratio, "examples/s")]
    if device.type == "cuda":
        a, b = memory["archipel"], memory["PyTorch"]
        rows.append(Row("gpu", f"{title}, memory", a / 1e6, b / 1e6, "PyTorch", a / b, "MB"))
    return rows


def modules(case: Case) -> tuple[Any, Any]:
    """The network, and the graph that was made of it as a module."""
    import torch

    from archipel import Model
    from archipel.training.cloud import TorchModule

    native = case.make()
    example = torch.zeros(2, *case.shape, dtype=torch.int64 if case.tokens else torch.float32)
    return native, TorchModule(Model.from_torch(case.make(), example))


def warm(step: Step, device: Any) -> int:
    """Make a few steps; bytes at the peak of one."""
    import torch

    for _ in range(3):
        step()
    if device.type != "cuda":
        return 0
    wait(device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    wait(device)
    return torch.cuda.max_memory_allocated() - before


def peak_flops(device: Any, size: int) -> float:
    """FLOP/s of a product of two bfloat16 matrices, the fastest of ten."""
    import torch

    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    times = []
    for _ in range(10):
        wait(device)
        started = time.perf_counter()
        torch.mm(a, a)
        wait(device)
        times.append(time.perf_counter() - started)
    return float(2 * size**3 / min(times))


def wait(device: Any) -> None:
    """Until the device has done what it was given."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def parsed() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the program")
    parser.add_argument("--tiny", action="store_true", help="small networks, to try the program")
    parser.add_argument("--only", action="append", metavar="NAME", help="ResNet-50, GPT-2 small, MobileNetV2")
    parser.add_argument("--rows", choices=("all", "eager", "compiled"), default="all", help="which rows")
    parser.add_argument("--minutes", type=float, default=7.0, help="no row begins after so many")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
