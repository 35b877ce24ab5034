"""Local steps of many clients at once on one device: how `training.cloud.Cohort` runs them, and what else there is.

SGD with momentum and cross entropy, one step of each client on a batch of its own, all from float32 arrays on the
device. "lanes" is the step program with a lane axis (what Cohort runs), "torch.func" is `torch.func.vmap` of the step
program's module, "one by one" that module for each client, "native" `torch.func` on the PyTorch module (`grad` below
`vmap`), "native, one by one" that module's backward and the same update for each client. They run in turns.

    python benchmarks/cohort.py                        32 clients, the CPU, three networks (two minutes)
    python benchmarks/cohort.py --device cuda --clients 100
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
from measure import Report, arguments, compare, interleave, keep_memory
from step_cases import CASES, data, network

NAMES = ("MLP", "LeNet", "LSTM")
BATCH, LR, MOMENTUM = 10, 0.05, 0.9


def main() -> None:
    options = parsed()
    keep_memory()
    import torch

    torch.set_num_threads(options.threads)
    report = Report(options.json, ("numpy", "torch"))
    for name in options.only or NAMES:
        steps = ways(name, options.clients, options.device)
        report.add(compare("cohort", f"{name}, {options.clients} clients", "lanes", interleave(steps, options.seconds)))


def parsed() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help=f"a network: {', '.join(CASES)}")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="PyTorch's threads")
    parser.add_argument("--seconds", type=float, default=10.0, help="about so long for each row and side")
    return parser.parse_args()


def ways(name: str, clients: int, device: str) -> dict[str, Callable[[], object]]:
    """Each way to make one step of all clients, a function without arguments."""
    import torch
    from torch.func import functional_call, grad_and_value, vmap
    from torch.nn import functional

    from archipel import Model, autodiff, training
    from archipel.bundle.roles import Example, Label, Parameter, State
    from archipel.training.cloud import TorchModule
    from archipel.training.cloud.graphs.recognizing import recognize_gradients

    case = CASES[name]
    x, y = data(case, BATCH * clients)
    x, y = (torch.as_tensor(each).reshape(clients, BATCH, *each.shape[1:]).to(device) for each in (x, y))
    model = Model.from_torch(network(case), x[0, :2].to("cpu"))
    step = training.step_graph(model, training.losses.cross_entropy(), training.optimizers.sgd(MOMENTUM, lr=LR))
    feed: dict[str, Any] = {}
    for port in step.program.inputs:
        if isinstance(port, Example | Label):
            feed[port.name] = x if isinstance(port, Example) else y
        elif isinstance(port, Parameter | State):
            first = step.initial.get(port.tensor, np.zeros([int(d) for d in port.shape], port.dtype))
            feed[port.name] = torch.from_numpy(np.array(first)).to(device).repeat(clients, *[1] * len(port.shape))
        else:
            feed[port.name] = torch.tensor(LR, device=device)
    over = [port.name for port in step.program.inputs if isinstance(port, Example | Label | Parameter | State)]
    graph = recognize_gradients(step)
    single = TorchModule(graph).requires_grad_(False).to(device)
    lanes = TorchModule(autodiff.vmap(graph, over)).requires_grad_(False).to(device)
    dims = tuple(0 if name in over else None for name in single.input_names)
    given = [feed[name] for name in single.input_names]
    stacked = [feed[name] for name in lanes.input_names]
    module = network(case).train().to(device)
    weights = {k: v.detach().repeat(clients, *[1] * v.ndim) for k, v in module.named_parameters()}
    momenta = {k: torch.zeros_like(v) for k, v in weights.items()}
    optimizer = torch.optim.SGD(module.parameters(), lr=LR, momentum=MOMENTUM)

    def native(weights: Any, momenta: Any, x: Any, y: Any) -> Any:
        def loss(weights: Any) -> Any:
            return functional.cross_entropy(functional_call(module, weights, (x,)), y)

        gradients, value = grad_and_value(loss)(weights)
        momenta = {k: MOMENTUM * momenta[k] + gradients[k] for k in gradients}
        return {k: weights[k] - LR * momenta[k] for k in gradients}, momenta, value

    def one_native() -> None:
        for each_x, each_y in zip(x, y):
            optimizer.zero_grad()
            functional.cross_entropy(module(each_x), each_y).backward()
            optimizer.step()

    def waited_for(run: Callable[[], object]) -> Callable[[], object]:
        def call() -> None:
            run()
            if device != "cpu":
                torch.accelerator.synchronize()

        return call

    def without_gradients(run: Callable[[], object]) -> Callable[[], object]:
        return waited_for(torch.inference_mode()(run))

    def one_by_one() -> None:
        for index in range(clients):
            single(*(value if dim is None else value[index] for value, dim in zip(given, dims)))

    return {
        "lanes": without_gradients(lambda: lanes(*stacked)),
        "torch.func": without_gradients(lambda: vmap(single, dims)(*given)),
        "one by one": without_gradients(one_by_one),
        "native": waited_for(lambda: vmap(native, randomness="different")(weights, momenta, x, y)),
        "native, one by one": waited_for(one_native),
    }


if __name__ == "__main__":
    main()
