"""Many clients in one step graph, and gradients of single examples.

- *clients*: one step of SGD of 10, 32 and 100 clients with weights and a batch of 10 of their own. Ours is vmap of the
  step graph, one run for all; peers are the same step graph, client after client, and torch.func.vmap of loss and
  gradient.
- *DP-SGD*: one step at batch 32 whose gradients are clipped example by example, without noise. Ours is what step_graph
  makes, with the examples as lanes; peers are the same step with the examples one after the other, in a Scan, and
  torch.func.vmap of the gradient.

PyTorch has one thread or two, whichever is faster for the case. Times are the least of the rounds: a run of many
clients takes long enough for other work on the machine to come in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import numpy as np
from measure import Row, interleave

THREADS = 2
CLIENTS = (10, 32, 100)
CLIENT_BATCH, BATCH = 10, 32
OURS, LOOP, TORCH, SCAN = "archipel", "one by one", "torch.func.vmap", "Scan over the examples"
LR = 1e-3


def clients_and_examples(quick: bool) -> Iterator[Row]:
    seconds = 0.5 if quick else 2.0
    names = ("logistic regression", "MLP", "FedAvg CNN")[: 2 if quick else 3]
    for name in names:
        module, shape = network(name)
        for clients in CLIENTS[: 1 if quick else 3]:
            yield from measure_clients(name, module, shape, clients, seconds)
    for name in names:
        module, shape = network(name)
        yield from measure_examples(name, module, shape, seconds)


def network(name: str) -> tuple[Any, tuple[int, ...]]:
    import torch

    from archipel import models

    if name == "MLP":
        return models.mlp(0), (784,)
    if name == "FedAvg CNN":
        return models.fedavg_cnn(0), (1, 28, 28)
    torch.manual_seed(0)
    return torch.nn.Linear(784, 10), (784,)


def measure_clients(name: str, module: Any, shape: tuple[int, ...], clients: int, seconds: float) -> list[Row]:
    from archipel import Model, autodiff, training

    model = Model.from_torch(module, np.zeros((2, *shape), np.float32))
    step = training.step_graph(model, training.losses.cross_entropy(), training.optimizers.sgd())
    mapped = autodiff.vmap(step, over=[port.name for port in step.inputs if port.name != "lr"], size=clients)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((clients, CLIENT_BATCH, *shape), np.float32)
    y = rng.integers(0, 10, (clients, CLIENT_BATCH))
    together = run_in_turns(mapped, [{"input": x, "label": y, **mapped.initial}])
    alone = run_in_turns(step, [{"input": x[i], "label": y[i], **step.initial} for i in range(clients)])
    peer = at_its_best(torch_clients(module, x, y))
    times = interleave({OURS: together, LOOP: alone, **peer}, seconds, warmup=1)
    return least("vmap", f"{name}, {clients} clients", OURS, times)


def run_in_turns(step: Any, starts: list[dict[str, np.ndarray]]) -> Callable[[], None]:
    """A callable that makes one step from each of `starts`; tensors are in two sets of buffers that swap roles."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = THREADS
    options.log_severity_level = 3
    session = ort.InferenceSession(step.to_bytes(), options, providers=["CPUExecutionProvider"])
    lr = ort.OrtValue.ortvalue_from_numpy(np.array(LR, np.float32))
    outputs = {port.name for port in step.outputs}
    queues = []
    for start in starts:
        sets = [{name: ort.OrtValue.ortvalue_from_numpy(np.array(v)) for name, v in start.items()} for _ in range(2)]
        bindings = []
        for read, write in ((sets[0], sets[1]), (sets[1], sets[0])):
            binding = session.io_binding()
            binding.bind_ortvalue_input("lr", lr)
            for name, value in read.items():
                binding.bind_ortvalue_input(name, value)
            for name in outputs:
                tensor = name.removesuffix(".next")
                if tensor in write:
                    binding.bind_ortvalue_output(name, write[tensor])
                else:
                    binding.bind_output(name)
            bindings.append(binding)
        queues.append(bindings)

    def run() -> None:
        for bindings in queues:
            session.run_with_iobinding(bindings[0])
            bindings.reverse()

    return run


def torch_clients(module: Any, x: np.ndarray, y: np.ndarray) -> Callable[[], None]:
    import torch
    from torch.func import functional_call, grad, vmap
    from torch.nn.functional import cross_entropy

    weights = {n: p.detach().expand(len(x), *p.shape).clone() for n, p in module.named_parameters()}
    data, labels = torch.from_numpy(x), torch.from_numpy(y)

    def loss(values: dict[str, Any], inputs: Any, targets: Any) -> Any:
        return cross_entropy(functional_call(module, values, (inputs,)), targets)

    gradients = vmap(grad(loss))

    def run() -> None:
        found = gradients(weights, data, labels)
        torch._foreach_add_(list(weights.values()), [found[name] for name in weights], alpha=-LR)

    return run


def least(benchmark: str, case: str, ours: str, times: Mapping[str, list[float]]) -> list[Row]:
    """Rows of the least times of `ours` and of every other."""
    best = {name: min(values) for name, values in times.items()}
    others = [name for name in best if name != ours]
    return [Row(benchmark, case, best[ours], best[name], name, best[ours] / best[name], "ms") for name in others]


def at_its_best(run: Callable[[], None]) -> dict[str, Callable[[], None]]:
    """PyTorch's run with the number of threads that is faster, under a name that says which."""
    import torch

    def with_threads(count: int) -> Callable[[], None]:
        def counted() -> None:
            torch.set_num_threads(count)
            run()

        return counted

    runs = {f"{TORCH}, threads: {count}": with_threads(count) for count in (1, THREADS)}
    times = interleave(runs, 0.2, warmup=1)
    best = min(runs, key=lambda name: min(times[name]))
    return {best: runs[best]}


def measure_examples(name: str, module: Any, shape: tuple[int, ...], seconds: float) -> list[Row]:
    from archipel import Model, training
    from archipel.training import example_lanes

    model = Model.from_torch(module, np.zeros((2, *shape), np.float32))
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((BATCH, *shape), np.float32), rng.integers(0, 10, BATCH)
    runs = {}
    for engine, limit in ((OURS, example_lanes.MAX_ELEMENTS), (SCAN, 0)):
        with mock.patch.object(example_lanes, "MAX_ELEMENTS", limit):
            step = training.step_graph(
                model, training.losses.cross_entropy(), training.optimizers.sgd(), per_example=training.per_example(1.0)
            )
        runs[engine] = run_in_turns(step, [{"input": x, "label": y, **step.initial}])
    times = interleave({**runs, **at_its_best(torch_examples(module, x, y))}, seconds, warmup=1)
    return least("vmap", f"{name}, DP-SGD", OURS, times)


def torch_examples(module: Any, x: np.ndarray, y: np.ndarray) -> Callable[[], None]:
    import torch
    from torch.func import functional_call, grad, vmap
    from torch.nn.functional import cross_entropy

    weights = {n: p.detach().clone() for n, p in module.named_parameters()}
    data, labels = torch.from_numpy(x), torch.from_numpy(y)

    def loss(values: dict[str, Any], inputs: Any, target: Any) -> Any:
        return cross_entropy(functional_call(module, values, (inputs[None],)), target[None])

    gradients = vmap(grad(loss), in_dims=(None, 0, 0))

    def run() -> None:
        found = gradients(weights, data, labels)
        norms = sum(g.flatten(1).square().sum(1) for g in found.values()).sqrt()
        factors = (1.0 / norms).clamp(max=1.0)
        totals = [torch.tensordot(factors, found[name], dims=1) for name in weights]
        torch._foreach_add_(list(weights.values()), totals, alpha=-LR / len(data))

    return run
