"""Measure the cluster that a training runs on: a few products, copies and small exchanges, in a few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from archipel.training.cloud.planner.calibrate import launch, operator_speeds
from archipel.training.cloud.planner.cluster import Cluster

_LARGE, _SMALL = 2**24, 2**8  # elements: more than caches hold, and next to nothing
_CHUNK, _CHUNKS = 512, 60  # a product of about two milliseconds on one thread of a CPU, and how many
_MEMORY_SHARE = 0.9  # of what a device has; the rest is for the allocator and PyTorch itself


def measure_cluster(
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
    layout: torch.memory_format = torch.contiguous_format,
) -> Cluster:
    """The cluster of the processes that have joined; each must call this, and all get the numbers of rank 0.

    On a machine that does something else at the same time the numbers are of what is left. `clock` gives seconds:
    time.process_time, on CPUs, leaves out what others take. `layout` is that of pictures, in
    order or torch.channels_last.
    """
    n, kind = dist.get_world_size(), device.type
    large, small = torch.zeros(_LARGE, device=device), torch.zeros(_SMALL, device=device)
    another, third = torch.zeros_like(large), torch.zeros_like(large)
    # Everybody computes at the same time, as in a step.
    speeds = operator_speeds(device, lambda call: _seconds(call, kind, clock), layout)
    small_one = launch(device, lambda call: _seconds(call, kind, clock, repeats=20))
    add = _seconds(lambda: torch.add(large, another, out=third), kind, clock)
    quick = _seconds(lambda: dist.all_reduce(small), kind, clock, repeats=20)
    slow = _seconds(lambda: dist.all_reduce(large), kind, clock, repeats=4)
    # A ring of n devices makes 2 (n - 1) steps, each of 1 / n of the message. One device alone copies it.
    steps = max(n - 1, 1)
    latency = quick / (2 * steps)
    bandwidth = large.nbytes / n / max((slow - quick) / (2 * steps), 1e-9)
    half = large.nbytes / n / bandwidth * steps + latency * steps
    part = large[: len(large) // n].clone()
    exchanges = {
        "all_gather": lambda: dist.all_gather_into_tensor(large, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, large),
    }
    taken = {name: _seconds(call, kind, clock, repeats=4) for name, call in exchanges.items()}
    slowdown = {name: max(seconds / half, 0.1) for name, seconds in taken.items()}
    if kind == "cpu":
        # gloo has no all-to-all: PyTorch gathers everything on each device, which keeps its part of it.
        slowdown["all_to_all"] = n * slowdown["all_gather"]
    laid = _redistribution(device, n)
    before = _seconds(lambda: laid(small), kind, clock, repeats=20)
    around = _seconds(lambda: laid(large), kind, clock, repeats=4)
    fresh = _seconds(lambda: torch.empty_like(large).fill_(1.0), kind, clock)
    found: dict[str, Any] = {
        "devices": n,
        "memory_bytes": int(_memory(device, n) * _MEMORY_SHARE),
        **speeds,
        "memory_bytes_per_second": 3 * large.nbytes / add,
        "fresh_bytes_per_second": large.nbytes / fresh,
        "launch_seconds": small_one,
        "link_bytes_per_second": bandwidth,
        "latency_seconds": latency,
        "exchange_seconds": max(before - quick, 1e-6),
        "wait_seconds": _waiting(device, clock, quick) if n > 1 else 0.0,
        "exchange_bytes_per_second": large.nbytes / max(around - slow - (before - quick), 1e-9),
        "slowdown": slowdown if n > 1 else {},
        # Where one processor computes and sends, neither goes on beside the other.
        "overlap": 0.0 if kind == "cpu" else 0.8,
    }
    agreed = [found]
    dist.broadcast_object_list(agreed, src=0, device=device)
    return Cluster(**agreed[0])


def _redistribution(device: torch.device, n: int) -> Callable[[torch.Tensor], object]:
    """An all-reduce as a DTensor's redistribution."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh = init_device_mesh(device.type, (n,))

    def redistribute(part: torch.Tensor) -> torch.Tensor:
        whole = DTensor.from_local(part, mesh, [Partial()], run_check=False)
        return whole.redistribute(placements=[Replicate()]).to_local()

    return redistribute


def _waiting(device: torch.device, clock: Callable[[], float], exchange: float) -> float:
    """What an exchange between two computations takes longer than one that follows others at once.

    Devices that compute as much do not end at the same moment, and each waits for the slowest; and threads that sleep
    meanwhile have to be woken. Both are in the mean and not in the median.
    """
    factor, small = torch.randn(_CHUNK, _CHUNK, device=device), torch.zeros(_SMALL, device=device)
    result = torch.empty_like(factor)
    taken = []
    for exchanges in (False, True):
        times = []
        for _ in range(_CHUNKS):
            if device.type == "cuda":
                torch.cuda.synchronize()
            start = clock()
            torch.mm(factor, factor, out=result)
            if exchanges:
                dist.all_reduce(small)
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(clock() - start)
        # Without what interrupts a few of them for long.
        kept = sorted(times)[: -_CHUNKS // 10]
        taken.append(sum(kept) / len(kept))
    return max(taken[1] - taken[0] - exchange, 0.0)


def _seconds(call: Callable[[], object], kind: str, clock: Callable[[], float], repeats: int = 8) -> float:
    """The median time of a call."""
    times = []
    for _ in range(repeats + 2):
        if kind == "cuda":
            torch.cuda.synchronize()
        start = clock()
        call()
        if kind == "cuda":
            torch.cuda.synchronize()
        times.append(clock() - start)
    return sorted(times[2:])[repeats // 2]


def _memory(device: torch.device, n: int) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    import os

    # Processes of one machine share what it has.
    local = int(os.environ.get("LOCAL_WORLD_SIZE", n))
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / local)
