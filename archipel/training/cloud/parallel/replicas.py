"""A whole copy of the module in each process (DistributedDataParallel), or shards of it (FSDP2): data in parallel."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from archipel.training.cloud.parallel.placed import Loss, Placed

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh


class Replicas(Placed):
    """`ddp`: each process has all parameters; the backward pass averages gradients in buckets (Li et al. 2020)."""

    name = "ddp"

    def __init__(self, module: nn.Module, mesh: DeviceMesh, device: torch.device) -> None:
        from torch.nn.parallel import DistributedDataParallel

        self.module, self.mesh, self.device = module, mesh, device
        self.data_rank, self.data_world = mesh.get_rank(), mesh.size()
        self._replica = DistributedDataParallel(
            module, device_ids=[device] if device.type == "cuda" else None, process_group=mesh.get_group()
        )

    def _backward(
        self, inputs: tuple[torch.Tensor, ...], targets: Any, loss: Loss, share: float, scale: float
    ) -> torch.Tensor:
        import torch

        own = loss(self._replica(*inputs), targets)
        # PyTorch averages over the processes, so each part counts data_world times.
        torch.autograd.backward(own * (share * self.data_world * scale))
        return own

    def _exchanging(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self._replica.no_sync()


class Shards(Placed):
    """`fsdp`: each process keeps a part of each parameter, gradient and optimizer state (Zhao et al. 2023; ZeRO 3).

    Parameters are gathered block by block for the forward and the backward pass. A block is a child with parameters of
    an nn.Sequential or nn.ModuleList; what lies outside is one more block.
    """

    name = "fsdp"

    def __init__(
        self, module: nn.Module, mesh: DeviceMesh, device: torch.device, compute_dtype: torch.dtype | None = None
    ) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        self.module, self.mesh, self.device = module, mesh, device
        self.data_rank, self.data_world = mesh.get_rank(), mesh.size()
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype)
        for block in blocks(module):
            fully_shard(block, mesh=mesh, mp_policy=policy)
        self._sharded_module = fully_shard(module, mesh=mesh, mp_policy=policy)

    def _backward(
        self, inputs: tuple[torch.Tensor, ...], targets: Any, loss: Loss, share: float, scale: float
    ) -> torch.Tensor:
        import torch

        own = loss(self.module(*inputs), targets)
        torch.autograd.backward(own * (share * self.data_world * scale))
        return own

    def _exchanging(self, last: bool) -> AbstractContextManager[Any]:
        self._sharded_module.set_requires_gradient_sync(last)
        return nullcontext()


def blocks(module: nn.Module) -> Sequence[nn.Module]:
    """The innermost repeated parts of a module that have parameters of their own, which no other block has.

    A part whose parameters another one shares is left out, and so is a container, which nobody calls.
    """
    from torch import nn

    containers = (nn.Sequential, nn.ModuleList)
    found: list[nn.Module] = []
    for part in module.modules():
        if isinstance(part, containers):
            found += [child for child in part.children() if not isinstance(child, nn.ModuleList)]
    # Outermost first in `modules()`: a block inside a block would gather twice, so only those that hold no other.
    outer = [block for block in found if not any(other is not block and other in block.modules() for other in found)]
    counts: dict[int, int] = {}
    for block in outer:
        for parameter in set(block.parameters()):
            counts[id(parameter)] = counts.get(id(parameter), 0) + 1
    rest = {id(p) for p in module.parameters()} - set(counts)
    shared = {key for key, count in counts.items() if count > 1} | rest
    return [
        block
        for block in outer
        if any(True for _ in block.parameters()) and not any(id(p) in shared for p in block.parameters())
    ]
