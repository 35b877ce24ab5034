"""The processes of one training: they join, find their device, and end together when one of them dies."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from archipel.errors import MissingExtraError, TrainingError
from archipel.library_errors import one_line
from archipel.training.cloud.parallel.allocation import keep_freed_memory

if TYPE_CHECKING:
    import torch

_LETTING_GO = 0.1  # seconds
# What torchrun sets for each process that it starts.
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# What gloo, NCCL and the store say when another process is gone or does not answer.
_LOST = ("connection closed", "connection reset", "broken pipe", "timed out", "timeout", "remote process exited",
         "socket error", "connection refused", "nccl communicator was aborted", "end of file")  # fmt: skip


@dataclass(frozen=True)
class Processes:
    """This process among those of the training: `rank` from 0 of `world`, computing on `device`."""

    rank: int
    world: int
    device: torch.device


def under_torchrun() -> bool:
    """Whether torchrun (or something that sets the same variables) started this process."""
    return all(name in os.environ for name in _VARIABLES)


@contextmanager
def processes(timeout_seconds: float = 300.0, device: str | None = None) -> Iterator[Processes]:
    """Join the other processes that torchrun started, and leave them at the end.

    Arguments:
        timeout_seconds: for how long a process waits for the others in one exchange, more than 0.
        device: "cpu" or "cuda"; None: the GPU of this process's local rank if there is one, else the CPU.

    Raises:
        TrainingError: torchrun did not start this process, there is no GPU for it, or another process died or did not
            answer in time. The last of these also where the body of `with` raises it as PyTorch's error.
        MissingExtraError: PyTorch is not installed.

    Example:
        # torchrun --nproc-per-node=2 train.py
        with parallel.processes() as here:
            placed = parallel.prepare(module, "ddp")
    """
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        raise MissingExtraError("torch", "cloud") from error
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        raise TrainingError(
            f"training in parallel needs several processes, and {missing[0]} is not set; start them with "
            "torchrun --nproc-per-node=2 -m archipel train config.toml"
        )
    if not timeout_seconds > 0:
        raise TrainingError(f"processes expects timeout_seconds above 0, got {timeout_seconds}")
    where = _device(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    else:
        keep_freed_memory()
    backend = "nccl" if where.type == "cuda" else "gloo"
    with told_clearly():
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_seconds))
    try:
        with told_clearly():
            yield Processes(dist.get_rank(), dist.get_world_size(), where)
            # Whoever leaves early closes connections that another one may still send on.
            if backend == "gloo":
                # Its plain barrier is a collective. The thread that ran one asks Python to let go of its tensors, and
                # aborts the process if Python has gone; what it ran last gets the time for that.
                dist.monitored_barrier()
                time.sleep(_LETTING_GO)
            else:
                dist.barrier()
    finally:
        dist.destroy_process_group()


def _device(device: str | None) -> torch.device:
    import torch

    local = int(os.environ["LOCAL_RANK"])
    count = torch.cuda.device_count()
    if device is None:
        device = "cuda" if count else "cpu"
    if device == "cpu":
        return torch.device("cpu")
    if device != "cuda":
        raise TrainingError(f'processes expects device "cpu" or "cuda", got {device!r}')
    if local >= count:
        raise TrainingError(
            f"process {local} of this machine has no GPU of its own: there are {count}; start as many processes "
            'as there are GPUs, or give device="cpu"'
        )
    return torch.device("cuda", local)


@contextmanager
def told_clearly() -> Iterator[None]:
    """Raise TrainingError, in one line, for PyTorch's errors that say that another process is lost."""
    try:
        yield
    except RuntimeError as error:  # DistBackendError, DistNetworkError and gloo's are RuntimeErrors
        text = str(error).lower()
        if not any(sign in text for sign in _LOST):
            raise
        raise TrainingError(
            f"another process of this training died or did not answer in time ({one_line(error)[:200]}); what was "
            "saved last is whole: look at that process's own error, and start all processes again to continue"
        ) from error
