"""Memory and time of a training step whose way back computes parts again, against `torch.utils.checkpoint`.

Networks of the zoo at batch 32, SGD with momentum, two threads: each step as it is, and with recompute="auto" (ours)
or with each block of the network inside `torch.utils.checkpoint.checkpoint` (PyTorch). Megabytes are what 5 steps add
to the peak of a process of their own that has the network loaded; milliseconds are the least of these steps' times.
Neither shares an allocator with another.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also where it is run as a process of its own

from measure import Row
from step_cases import CASES, Case, data, keep, kept_step, network, ours

BATCH, THREADS, STEPS = 32, 2, 5
NETWORKS, QUICK_NETWORKS = ("ResNet-8", "MobileNetV2", "Transformer", "LSTM"), ("Transformer",)
OURS, TORCH = "archipel", "PyTorch"


def checkpointed_steps(quick: bool) -> Iterator[Row]:
    """Rows: ours recomputed against ours as it is, PyTorch's against its own, then ours against PyTorch's."""
    for name in QUICK_NETWORKS if quick else NETWORKS:
        with tempfile.TemporaryDirectory() as folder:
            found = {}
            for engine in (OURS, TORCH):
                for again in (False, True):
                    path = Path(folder) / f"step-{again}.onnx"
                    if engine == OURS:
                        write_step(CASES[name], path, again)
                    found[engine, again] = in_process(engine, name, again, path)
        pairs = [
            ("recomputed, as it is", (OURS, True), (OURS, False), "archipel as it is"),
            ("PyTorch, as it is", (TORCH, True), (TORCH, False), "PyTorch as it is"),
            ("recomputed", (OURS, True), (TORCH, True), "torch.utils.checkpoint"),
        ]
        for title, mine, other, peer in pairs:
            for unit, a, b in zip(("MB", "ms"), found[mine], found[other]):
                yield Row("checkpoint", f"{name} {title}", a, b, peer, a / max(b, 1e-9), unit)


def write_step(case: Case, path: Path, again: bool) -> None:
    from archipel import Model, training

    model = Model.from_torch(network(case).train(), data(case, 2)[0])
    loss = training.losses.cross_entropy(axis=-1) if case.vocabulary else training.losses.cross_entropy()
    option = training.recompute(batch_size=BATCH) if again else None
    step = training.step_graph(model, loss, training.optimizers.sgd(momentum=0.9), recompute=option)
    step.save(path)
    keep(step, path)


def in_process(engine: str, name: str, again: bool, path: Path) -> tuple[float, float]:
    """Megabytes and milliseconds."""
    command = [sys.executable, __file__, engine, name, str(int(again)), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    megabytes, milliseconds = json.loads(done.stdout)
    return megabytes, milliseconds


def measure(engine: str, name: str, again: bool, path: Path) -> tuple[float, float]:
    x, y = data(CASES[name], BATCH)
    run: Callable[[], Any]
    if engine == OURS:
        run, _ = ours(kept_step(path), path, x, y, THREADS)
    else:
        run = torch_step(name, x, y, again)
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far counts no longer
    before, times = peak(), []
    for _ in range(STEPS):
        started = time.perf_counter()
        run()
        times.append((time.perf_counter() - started) * 1e3)
    return peak() - before, min(times)


def torch_step(name: str, x: Any, y: Any, again: bool) -> Callable[[], Any]:
    import torch
    from torch.nn import functional
    from torch.utils.checkpoint import checkpoint

    torch.set_num_threads(THREADS)
    net = network(CASES[name]).train()
    if again:
        for block in blocks(net):
            forward = block.forward
            block.forward = lambda *a, forward=forward, **k: checkpoint(forward, *a, use_reentrant=False, **k)
    inputs, labels = torch.from_numpy(x), torch.from_numpy(y)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9, fused=True)

    def run() -> None:
        optimizer.zero_grad()
        logits = net(inputs)
        functional.cross_entropy(logits.flatten(0, -2), labels.flatten()).backward()
        optimizer.step()

    return run


def blocks(net: Any) -> list[Any]:
    """The repeated parts of a network: modules that have modules themselves, of the network or of its lists and
    sequences; the recurrent layer of a network that has none."""
    import torch

    lists = torch.nn.ModuleList | torch.nn.Sequential
    parts = [part for m in net.children() for part in (m if isinstance(m, lists) else [m])]
    found = [part for part in parts if list(part.children())]
    found = found or [m for m in net.modules() if isinstance(m, torch.nn.LSTM)]
    assert found, f"{type(net).__name__}: no part that could be computed again"
    return found


def peak() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    engine_, name_, again_, path_ = sys.argv[1:]
    print(json.dumps(measure(engine_, name_, again_ == "1", Path(path_))))
