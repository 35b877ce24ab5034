"""Time of one training step in the cloud: a graph as `TorchModule` against the PyTorch module that it was made of.

Forward, cross entropy, backward and SGD with momentum (fused) at batch 32 on the CPU, eager and with torch.compile.
Both take the memory layout that is faster for the PyTorch module. They run in one process in turns, so that they share
threads and the allocator.

    python benchmarks/cloud.py                    every network, eager and compiled (about 15 minutes)
    python benchmarks/cloud.py --quick            three networks, eager, under a minute
    python benchmarks/cloud.py --threads 1 --processor-time      on a machine that others use as well
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from measure import Report, arguments, compare, interleave, keep_memory
from step_cases import CASES, Case, data, network

QUICK = ("MLP", "ResNet-8", "Transformer")
BATCH = 32


def main() -> None:
    options = parsed()
    keep_memory()
    import torch

    torch.set_num_threads(options.threads)
    clock = time.process_time if options.processor_time else time.perf_counter
    report = Report(options.json, ("numpy", "torch"))
    for name, case in CASES.items():
        if (options.only and name not in options.only) or (options.quick and name not in QUICK):
            continue
        for compiled in (False,) if options.quick or options.no_compile else (False, True):
            kind = "compiled" if compiled else "eager"
            steps = both(case, compiled, options.seconds, clock)
            times = interleave(steps, options.seconds, clock=clock)
            report.add(compare("cloud", f"{name}, {kind}", "archipel", times))


def parsed() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help=f"a network: {', '.join(CASES)}")
    parser.add_argument("--no-compile", action="store_true", help="eager rows only")
    parser.add_argument("--threads", type=int, default=2, help="PyTorch's threads")
    parser.add_argument("--processor-time", action="store_true", help="take processor time, not the clock's")
    parser.add_argument("--seconds", type=float, default=None, help="about so long for each row and side")
    found = parser.parse_args()
    found.seconds = found.seconds or (3.0 if found.quick else 10.0)
    return found


def both(case: Case, compiled: bool, seconds: float, clock: Callable[[], float]) -> dict[str, Callable[[], object]]:
    """A step of ours and one of PyTorch's, in the layout in which PyTorch's is faster."""
    import torch

    from archipel import Model
    from archipel.training.cloud import TorchModule

    x, y = data(case, BATCH)
    layouts = [torch.contiguous_format] + ([torch.channels_last] if x.ndim == 4 else [])
    tried = {str(layout): step(network(case), x, y, layout, compiled) for layout in layouts}
    if len(layouts) > 1:
        times = interleave(tried, seconds / 4, clock=clock)
        layouts.sort(key=lambda layout: statistics.median(times[str(layout)]))
    fastest = layouts[0]
    module = TorchModule(Model.from_torch(network(case), x[:2]))
    name = "PyTorch" + (", channels last" if fastest is torch.channels_last else "")
    return {"archipel": step(module, x, y, fastest, compiled), name: tried[str(fastest)]}


def step(module: Any, x: Any, y: Any, layout: Any, compiled: bool) -> Callable[[], object]:
    """A callable that makes one step."""
    import torch

    module.train()
    inputs, labels = torch.from_numpy(x), torch.from_numpy(y).reshape(-1)
    if inputs.ndim == 4:
        module.to(memory_format=layout)
        inputs = inputs.contiguous(memory_format=layout)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9, fused=True)
    run = torch.compile(module) if compiled else module

    def make() -> None:
        outputs = run(inputs)
        loss = torch.nn.functional.cross_entropy(outputs.reshape(-1, outputs.shape[-1]), labels)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()

    return make


if __name__ == "__main__":
    main()
