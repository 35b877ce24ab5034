"""Tensor parallelism of a graph, alone or within groups, as the planner divides its operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from archipel.training.cloud.parallel.placed import Loss, Placed

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from archipel.training.cloud.graphs.torch_module import TorchModule
    from archipel.training.cloud.planner.costs import Unit
    from archipel.training.cloud.planner.shardings import Strategy


class Divided(Placed):
    """`tensor`, `hybrid` and `auto` of a TorchModule: parameters and activations are divided operator by operator.

    The processes of one group read the same examples; groups divide the batch. Parameters are DTensors over the group.
    """

    adds_up = True

    def __init__(
        self,
        module: TorchModule,
        units: Sequence[Unit],
        strategies: Mapping[str, Strategy],
        mesh: DeviceMesh,
        device: torch.device,
        name: str,
    ) -> None:
        from torch import nn
        from torch.distributed.tensor import distribute_tensor

        from archipel.training.cloud.parallel.rewriting import parameter_layouts, placement, rewrite

        self.name, self.mesh, self.device = name, mesh, device
        self.data_rank, self.data_world = mesh.get_local_rank("data"), mesh.size(0)
        self._model = mesh["model"]
        self._divides_examples = any(strategy.name == "batch" for strategy in strategies.values())
        rewritten = rewrite(module, units, strategies, self._model)
        layouts = parameter_layouts(units, strategies)
        paths = {path: graph_name for graph_name, path in module._paths.items()}
        done: dict[int, nn.Parameter] = {}
        for path, parameter in list(rewritten.named_parameters(remove_duplicate=False)):
            if id(parameter) not in done:
                layout = layouts.get(paths.get(path, path), -1)
                shards = distribute_tensor(parameter.detach(), self._model, [placement(layout)])
                done[id(parameter)] = nn.Parameter(shards, parameter.requires_grad)
            owner, _, last = path.rpartition(".")
            setattr(rewritten.get_submodule(owner), last, done[id(parameter)])
        self.module = rewritten

    def _backward(
        self, inputs: tuple[torch.Tensor, ...], targets: Any, loss: Loss, share: float, scale: float
    ) -> torch.Tensor:
        import torch

        own = loss(self._run(inputs), targets)
        torch.autograd.backward(own * (share * scale))
        if self._last:
            self._add_up()
        return own

    def forward(self, inputs: Sequence[torch.Tensor]) -> Any:
        import torch

        with torch.no_grad():
            return self._run(inputs)

    def _run(self, inputs: Sequence[torch.Tensor]) -> Any:
        """The outputs for a batch of any size: the last example goes in again, as often as the processes need it."""
        import torch
        from torch.utils import _pytree as pytree

        count = len(inputs[0])
        more = -count % self._model.size() if self._divides_examples else 0
        if not more:
            return self.module(*inputs)
        whole = [torch.cat([tensor, tensor[-1:].expand(more, *tensor.shape[1:])]) for tensor in inputs]
        return pytree.tree_map(
            lambda tensor: tensor[:count] if tensor.ndim and len(tensor) == count + more else tensor,
            self.module(*whole),
        )

    def _exchanging(self, last: bool) -> Any:
        self._last = last
        return super()._exchanging(last)

    def _add_up(self) -> None:
        """Bring gradients into the layout of their parameters, and add those of all groups."""
        import torch
        import torch.distributed as dist

        gradients: dict[Any, list[Any]] = {}
        for parameter in self.module.parameters():
            found: Any = parameter.grad
            if found is not None:
                wanted: Any = parameter
                parameter.grad = found = found.redistribute(placements=wanted.placements)
                gradients.setdefault(found.dtype, []).append(found.to_local())
        if self.data_world > 1:
            for alike in gradients.values():  # in one exchange
                flat = torch.cat([gradient.reshape(-1) for gradient in alike])
                dist.all_reduce(flat, group=self._data_group())
                for gradient, part in zip(alike, torch.split(flat, [gradient.numel() for gradient in alike])):
                    gradient.copy_(part.view_as(gradient))

    def _data_group(self) -> Any:
        return self.mesh.get_group("data")
