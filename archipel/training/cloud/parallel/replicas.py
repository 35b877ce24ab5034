"""A whole copy of the module in each process (DistributedDataParallel), or shards of it (FSDP2): data in parallel."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from archipel.mode import get_mode
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

    Parameters are gathered block by block for the forward and the backward pass. Of a graph a block is a segment of at
    least `segment_bytes` of parameters; of another module it is a child with parameters of an nn.Sequential or
    nn.ModuleList. What several blocks read, or lies outside, is gathered for the whole step.
    """

    name = "fsdp"

    def __init__(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        device: torch.device,
        compute_dtype: torch.dtype | None = None,
        segment_bytes: int | None = None,
    ) -> None:
        from torch import fx
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        from archipel.training.cloud.parallel.segments import segment

        self.module, self.mesh, self.device = module, mesh, device
        self.data_rank, self.data_world = mesh.get_rank(), mesh.size()
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype)
        # Node by node a graph runs as a whole.
        is_cut = isinstance(module, fx.GraphModule) and get_mode() == "graph"
        segments = segment(module, segment_bytes) if is_cut else None  # type: ignore[arg-type]
        if segments is None:
            for block in blocks(module):
                fully_shard(block, mesh=mesh, mp_policy=policy)
            self._run: Any = fully_shard(module, mesh=mesh, mp_policy=policy)
            return
        places = {id(each): name for name, each in segments.named_parameters()}
        for part in segments.segments:
            fully_shard(part, mesh=mesh, mp_policy=policy)
        self._run = fully_shard(segments, mesh=mesh, mp_policy=policy)
        # The module keeps its names, for the optimizer and checkpoints, and gets the shards.
        for path, parameter in list(module.named_parameters(remove_duplicate=False)):
            if id(parameter) in places:
                owner, _, last = path.rpartition(".")
                setattr(module.get_submodule(owner), last, segments.get_parameter(places[id(parameter)]))

    def forward(self, inputs: Sequence[torch.Tensor]) -> Any:
        import torch

        with torch.no_grad():
            return self._run(*inputs)

    def _backward(
        self, inputs: tuple[torch.Tensor, ...], targets: Any, loss: Loss, share: float, scale: float
    ) -> torch.Tensor:
        import torch

        own = loss(self._run(*inputs), targets)
        torch.autograd.backward(own * (share * self.data_world * scale))
        return own

    def _exchanging(self, last: bool) -> AbstractContextManager[Any]:
        self._run.set_requires_gradient_sync(last)
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
