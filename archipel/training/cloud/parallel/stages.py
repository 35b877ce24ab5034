"""Pipeline parallelism: each process runs one stage of the graph, on microbatches that follow each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from archipel.errors import TrainingError
from archipel.training.cloud.parallel.cuts import cut
from archipel.training.cloud.parallel.placed import Loss, Placed

if TYPE_CHECKING:
    import torch
    from torch import fx, nn
    from torch.distributed.device_mesh import DeviceMesh


class Stages(Placed):
    """`pipeline`: the schedule 1F1B (Narayanan et al. 2019) of torch.distributed.pipelining.

    Every process is given the same examples; the first one reads the inputs, the last one the targets. The mean loss is
    that over microbatches of one size: a batch that `microbatches` does not divide, as the last one of an epoch, has as
    many as do, one for each stage at least. Statistics of batch normalization are those of a microbatch.
    """

    name = "pipeline"

    def __init__(
        self, graph: fx.GraphModule, starts: Sequence[str], mesh: DeviceMesh, device: torch.device, microbatches: int
    ) -> None:
        self.mesh, self.device = mesh, device
        self.data_rank, self.data_world = 0, 1
        self._rank, self._world, self._microbatches = mesh.get_rank(), mesh.size(), microbatches
        self._group = mesh.get_group()
        if len(starts) != self._world - 1:
            raise TrainingError(
                f"a pipeline over {self._world} processes has {self._world} stages, got {len(starts) + 1}"
            )
        self._stages = cut(graph, starts)
        self.module: nn.Module = self._stages[self._rank].to(device)
        self._schedules: dict[Any, tuple[Any, list[Any]]] = {}
        self._now: tuple[Any, Loss, float] | None = None

    def _backward(
        self, inputs: tuple[torch.Tensor, ...], targets: Any, loss: Loss, share: float, scale: float
    ) -> torch.Tensor:
        import torch
        import torch.distributed as dist

        count = len(inputs[0])
        # The schedule wants a microbatch for each stage at least.
        fitting = [parts for parts in range(self._world, self._microbatches + 1) if count % parts == 0]
        if not fitting:
            raise TrainingError(
                f"a batch of {count} examples cannot be divided into {self._world} to {self._microbatches} "
                "microbatches of one size; choose a batch size that can, and data whose last batch can"
            )
        parts = max(fitting)
        schedule, _ = self._schedule(inputs, parts, training=True)
        self._now = (targets, loss, scale / parts)
        losses: list[torch.Tensor] = []
        arguments = inputs if self._rank == 0 else ()
        own = torch.zeros((), dtype=torch.float64, device=self.device)
        if self._rank == self._world - 1:
            rows = torch.arange(count, device=self.device)
            schedule.step(*arguments, target=rows, losses=losses, return_outputs=False)
            own += torch.stack(losses).sum().detach() / scale
        else:
            schedule.step(*arguments, return_outputs=False)
        dist.broadcast(own, group_src=self._world - 1, group=self._group)
        return own

    def forward(self, inputs: Sequence[torch.Tensor]) -> Any:
        import torch
        import torch.distributed as dist
        from torch.utils import _pytree as pytree

        rows = len(inputs[0])
        missing = -rows % self._microbatches
        # Microbatches have one size: the first example fills the last one, and its outputs are left out.
        inputs = [torch.cat([tensor, tensor[:1].expand(missing, *tensor.shape[1:])]) for tensor in inputs]
        schedule, outputs = self._schedule(tuple(inputs), self._microbatches, training=False)
        with torch.no_grad():
            result = schedule.eval(*(inputs if self._rank == 0 else ()))
            if result is None:
                result = pytree.tree_map(lambda like: torch.empty_like(like, device=self.device), outputs)
            for tensor in pytree.tree_leaves(result):
                dist.broadcast(tensor, group_src=self._world - 1, group=self._group)
        return pytree.tree_map(lambda tensor: tensor[:rows], result)

    def _of_rows(self, outputs: Any, rows: torch.Tensor) -> torch.Tensor:
        """The loss of one microbatch. The schedule can divide one tensor of targets: these rows pick from all."""
        from torch.utils import _pytree as pytree

        assert self._now is not None
        targets, loss, scale = self._now
        return loss(outputs, pytree.tree_map(lambda tensor: tensor[rows], targets)) * scale

    def _schedule(self, inputs: tuple[torch.Tensor, ...], microbatches: int, training: bool) -> tuple[Any, Any]:
        """The schedule for batches of these shapes, and the outputs of a whole batch as tensors without contents."""
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        key = (training, microbatches, *((tuple(tensor.shape), tensor.dtype) for tensor in inputs))
        if key not in self._schedules:
            # Shapes are told to PyTorch, which would otherwise run stages on made-up values, and change statistics.
            borders, outputs = self._shapes(inputs, microbatches, training)
            stage = PipelineStage(
                self.module,
                self._rank,
                self._world,
                self.device,
                input_args=borders[self._rank],
                output_args=borders[self._rank + 1],
                group=self._group,
            )
            loss = self._of_rows if training else None
            # Not by PyTorch, which would scale what earlier batches have added as well.
            self._schedules[key] = (Schedule1F1B(stage, microbatches, loss_fn=loss, scale_grads=False), outputs)
        return self._schedules[key]

    def _shapes(
        self, inputs: tuple[torch.Tensor, ...], microbatches: int, training: bool
    ) -> tuple[list[tuple[torch.Tensor, ...]], Any]:
        """What enters each stage and leaves the last one, of a microbatch, and the whole outputs: without contents."""
        import torch
        from torch.utils import _pytree as pytree

        borders: list[tuple[torch.Tensor, ...]] = []
        whole: Any = None
        for parts in (1, microbatches):
            values: Any = tuple(tensor[: len(tensor) // parts].to("meta") for tensor in inputs)
            borders = [values]
            with torch.set_grad_enabled(training):
                for stage in self._stages:
                    tensors = {k: v.to("meta") for k, v in (*stage.named_parameters(), *stage.named_buffers())}
                    values = torch.func.functional_call(stage, tensors, values)
                    whole = values if parts == 1 else whole
                    values = values if isinstance(values, tuple) else (values,)
                    borders.append(values)
        detached = [tuple(t.detach().requires_grad_(t.requires_grad) for t in border) for border in borders]
        return detached, pytree.tree_map(lambda tensor: tensor.detach(), whole)

    def _over_stages(self, value: torch.Tensor) -> torch.Tensor:
        import torch.distributed as dist

        dist.all_reduce(value, group=self._group)
        return value

    def state_dict(self) -> dict[str, torch.Tensor]:
        import torch.distributed as dist

        own = {name: tensor.detach().cpu() for name, tensor in self.module.state_dict().items()}
        parts: list[Any] | None = [None] * self._world if self._rank == 0 else None
        dist.gather_object(own, parts, group_dst=0, group=self._group)
        return {} if parts is None else {name: tensor for part in parts for name, tensor in part.items()}
