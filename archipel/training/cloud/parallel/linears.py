"""Tensor parallelism of an nn.Module by its nn.Linear layers: for modules of which there is no graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from archipel.errors import TrainingError
from archipel.training.cloud.parallel.placed import Loss, Placed

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh


class ShardedLinears(Placed):
    """`tensor` of an nn.Module: Linear layers divided by columns or rows, all else whole (Shoeybi et al. 2019).

    Every process reads the same examples.
    """

    name = "tensor"

    def __init__(self, module: nn.Module, mesh: DeviceMesh, device: torch.device) -> None:
        from torch.distributed.tensor.parallel import parallelize_module

        self.module, self.mesh, self.device = module, mesh, device
        self.data_rank, self.data_world = 0, 1
        plan = linear_plan(module, mesh.size())
        if not plan:
            raise TrainingError(
                f'parallel="tensor" found no nn.Linear in {type(module).__name__} whose width {mesh.size()} processes '
                'can divide; give a TorchModule, whose convolutions and products it divides too, or use "ddp"'
            )
        parallelize_module(module, mesh, plan)

    def _backward(
        self, inputs: tuple[torch.Tensor, ...], targets: Any, loss: Loss, share: float, scale: float
    ) -> torch.Tensor:
        import torch

        own = loss(self.module(*inputs), targets)
        torch.autograd.backward(own * scale)
        return own


def linear_plan(module: nn.Module, count: int) -> dict[str, Any]:
    """How `parallelize_module` divides each Linear over `count` processes, by its name.

    Two Linear layers of one nn.Sequential with elementwise layers between are divided by columns and then by rows, so
    that only the second exchanges tensors. Each other Linear is divided by columns and its output gathered.
    """
    from torch import nn
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    elementwise = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.ReLU6, nn.Hardswish)
    plan: dict[str, Any] = {}
    # nn.MultiheadAttention reads the weight of its Linear and never calls it.
    unseen = {id(child) for part in module.modules() if isinstance(part, nn.MultiheadAttention)
              for child in part.modules()}  # fmt: skip
    names = {id(part): name for name, part in module.named_modules()}
    for part in module.modules():
        if not isinstance(part, nn.Sequential):
            continue
        first: nn.Linear | None = None
        for child in part:
            if isinstance(child, nn.Linear):
                if first is not None and first.out_features % count == 0:
                    plan[names[id(first)]], plan[names[id(child)]] = ColwiseParallel(), RowwiseParallel()
                    first = None
                else:
                    first = child
            elif not isinstance(child, elementwise):
                first = None
    for name, part in module.named_modules():
        called = isinstance(part, nn.Linear) and id(part) not in unseen
        if called and name and name not in plan and part.out_features % count == 0:
            plan[name] = ColwiseParallel(output_layouts=Replicate())
    return plan
