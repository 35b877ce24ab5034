"""Measure the cluster that a training runs on: a few products, copies and small exchanges, in a few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from archipel.training.cloud.planner.cluster import Cluster

_WIDTH = 512
_LARGE, _SMALL = 2**22, 2**8  # elements of an exchange
_MEMORY_SHARE = 0.9  # of what a device has; the rest is for the allocator and PyTorch itself


def measure_cluster(device: torch.device) -> Cluster:
    """The cluster of the processes that have joined; each must call this, and all get the numbers of rank 0.

    On a machine that does something else at the same time the numbers are of what is left.
    """
    n, kind = dist.get_world_size(), device.type
    x = torch.randn(_WIDTH, _WIDTH, device=device)
    images = torch.randn(16, 32, 32, 32, device=device)
    kernel = torch.randn(32, 32, 3, 3, device=device)
    large, small = torch.zeros(_LARGE, device=device), torch.zeros(_SMALL, device=device)
    few = torch.zeros(8, device=device)
    # Everybody computes at the same time, as in a step.
    product = _seconds(lambda: x @ x, kind)
    convolution = _seconds(lambda: torch.conv2d(images, kernel, padding=1), kind)
    add = _seconds(lambda: torch.add(large, 1.0), kind)
    launch = _seconds(lambda: torch.relu(few), kind, repeats=200)
    if n > 1:
        quick = _seconds(lambda: dist.all_reduce(small), kind, repeats=20)
        slow = _seconds(lambda: dist.all_reduce(large), kind, repeats=4)
    else:
        quick, slow = 1e-6, 1e-3
    # A ring of n devices makes 2 (n - 1) steps, each of 1 / n of the message.
    steps = 2 * max(n - 1, 1)
    latency = quick / steps
    bandwidth = 4 * _LARGE / n / max((slow - quick) / steps, 1e-9)
    found: dict[str, Any] = {
        "devices": n,
        "memory_bytes": int(_memory(device, n) * _MEMORY_SHARE),
        "flops_per_second": {"float32": 2 * _WIDTH**3 / product},
        "convolution_flops_per_second": {"float32": 2 * 16 * 32 * 32 * 32 * 32 * 9 / convolution},
        "memory_bytes_per_second": 2 * 4 * _LARGE / add,
        "launch_seconds": launch,
        "link_bytes_per_second": bandwidth,
        "latency_seconds": latency,
        "exchange_seconds": _exchange(device, n, quick),
        # Where one processor computes and sends, neither goes on beside the other.
        "overlap": 0.0 if kind == "cpu" else 0.8,
    }
    agreed = [found]
    dist.broadcast_object_list(agreed, src=0, device=device)
    return Cluster(**agreed[0])


def _exchange(device: torch.device, n: int, bare: float) -> float:
    """What a DTensor's redistribution takes longer than the exchange itself."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh = init_device_mesh(device.type, (n,))
    part = torch.zeros(_SMALL, device=device)

    def redistribute() -> None:
        DTensor.from_local(part, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()]).to_local()

    return max(_seconds(redistribute, device.type, repeats=20) - bare, 1e-6)


def _seconds(call: Callable[[], object], kind: str, repeats: int = 8) -> float:
    """The median time of a call."""
    times = []
    for _ in range(repeats + 2):
        if kind == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if kind == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times[2:])[repeats // 2]


def _memory(device: torch.device, n: int) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    import os

    # Processes of one machine share what it has.
    local = int(os.environ.get("LOCAL_WORLD_SIZE", n))
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / local)
