"""How a module computes a minibatch: in this process alone, or placed over several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archipel.errors import CheckpointError, TrainingError
from archipel.training.cloud.parallel.placed import Placed
from archipel.training.cloud.parallel.shards import laid_as, names_in_order, part_of, read_shards, set_whole

if TYPE_CHECKING:
    import torch
    from torch import nn

Loss = Callable[[Any, Any], "torch.Tensor"]


class Alone:
    """The module in this process.

    Attributes:
        module: what is trained; it follows `train()` and `eval()`.
        rank, world: which part of the data this process reads, of how many.
        number, processes: this process's number among all, and how many there are.
    """

    rank, world, number, processes = 0, 1, 0, 1

    def __init__(self, module: nn.Module, compiled: bool = False) -> None:
        import torch

        self.module = module
        self._run: Any = torch.compile(module) if compiled else module

    @property
    def first(self) -> bool:
        """Whether this process writes files and speaks."""
        return self.number == 0

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """What the optimizer updates, by name."""
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    def parameters(self) -> list[nn.Parameter]:
        """What the optimizer updates."""
        return list(self.named_parameters().values())

    def step(
        self, inputs: Sequence[torch.Tensor], targets: Any, loss: Loss, scale: float, last: bool, share: float = 1.0
    ) -> torch.Tensor:
        """Add the gradients of `scale` times the whole batch's loss, and return that loss; see Placed.step."""
        import torch

        value = loss(self._run(*inputs), targets)
        torch.autograd.backward(value if scale == 1.0 else value * scale)
        return value.detach()

    def forward(self, inputs: Sequence[torch.Tensor]) -> Any:
        """The outputs, without gradients."""
        return self.module(*inputs)

    def clip(self, norm: float) -> None:
        """Scale all gradients together to this 2-norm at most."""
        import torch

        torch.nn.utils.clip_grad_norm_(self.parameters(), norm)

    def total(self, value: torch.Tensor) -> torch.Tensor:
        """The sum over the parts of the data."""
        return value

    def count(self, examples: int) -> int:
        """The examples of a batch, of which this process's part has so many."""
        return examples

    def most(self, number: int) -> int:
        """The largest of the whole numbers that the processes give: they decide alike, whoever of them knew."""
        return number

    def weights(self) -> dict[str, torch.Tensor]:
        """Copies of all parameters and buffers, whole; empty in all processes but the first."""
        return {name: tensor.detach().clone() for name, tensor in self.module.state_dict().items()}

    def take_over(self, weights: Mapping[str, torch.Tensor]) -> nn.Module:
        """The module as one process would have it, with these weights, or the present ones where there are none."""
        if weights:
            self.module.load_state_dict(weights)
        return self.module

    def gather(self, value: Any) -> list[Any]:
        """What each process gives, in the order of their numbers."""
        return [value]

    def state(
        self, optimizer: torch.optim.Optimizer, folder: Path, name: str, averages: Sequence[torch.Tensor] = ()
    ) -> dict[str, Any]:
        """Module, optimizer and the averages of its parameters, for the checkpoint's file."""
        return {
            "module": self.module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "names": names_in_order(self.module, optimizer),
            "averages": dict(zip(self.named_parameters(), averages)),
        }

    def restore(
        self,
        content: Mapping[str, Any],
        optimizer: torch.optim.Optimizer,
        folder: Path,
        averages: Sequence[torch.Tensor] = (),
    ) -> None:
        """Continue from what `state` gave, here or in a training by another number of processes."""
        if "shards" in content:
            extra = {"averages": dict(zip(self.named_parameters(), averages))} if averages else None
            read_shards(folder / _shards(content, folder), self.module, optimizer, extra)
            return
        self.module.load_state_dict(content["module"])
        optimizer.load_state_dict(content["optimizer"])
        for own, name in zip(averages, self.named_parameters()):
            own.copy_(content["averages"][name])

    def set_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Give parameters gradients to which the next minibatches add theirs: whole ones, of the whole batch's loss."""
        for name, parameter in self.named_parameters().items():
            if name in gradients:
                parameter.grad = part_of(parameter, gradients[name])

    def tidy(self, folder: Path, name: str) -> None:
        """Remove what checkpoints before this one have left."""
        import shutil

        if self.first:
            for old in folder.glob(f"{SHARDS}*"):
                if old.name != name:
                    shutil.rmtree(old, ignore_errors=True)


class Together(Alone):
    """The module placed over the processes that torchrun started.

    Arguments:
        placed: what `parallel.prepare` made.
        plain: a module of the same parameters in this process, for the result.
    """

    def __init__(self, placed: Placed, plain: nn.Module) -> None:
        import torch.distributed as dist

        self._placed, self._plain = placed, plain
        self.module = placed.module
        self.rank, self.world = placed.data_rank, placed.data_world
        self.number, self.processes = dist.get_rank(), dist.get_world_size()
        # Numbers that decide what comes next are exchanged beside the GPU, which need not be waited for.
        self._beside = dist.new_group(backend="gloo") if dist.get_backend() == "nccl" else None

    def step(
        self, inputs: Sequence[torch.Tensor], targets: Any, loss: Loss, scale: float, last: bool, share: float = 1.0
    ) -> torch.Tensor:
        return self._placed.step(inputs, targets, loss, share=share, scale=scale, last=last)

    def forward(self, inputs: Sequence[torch.Tensor]) -> Any:
        return self._placed.forward(inputs)

    def clip(self, norm: float) -> None:
        self._placed.clip(norm)

    def total(self, value: torch.Tensor) -> torch.Tensor:
        return self._placed.total(value)

    def count(self, examples: int) -> int:
        # Processes of one group have the same part.
        return self._exchange(examples, "SUM") * self.world // self.processes

    def most(self, number: int) -> int:
        return self._exchange(number, "MAX")

    def _exchange(self, number: int, how: str) -> int:
        import torch
        import torch.distributed as dist

        found = torch.tensor(number)
        dist.all_reduce(found, op=getattr(dist.ReduceOp, how), group=self._beside)
        return int(found)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self._placed.state_dict().items()}

    def take_over(self, weights: Mapping[str, torch.Tensor]) -> nn.Module:
        import torch.distributed as dist

        found = [dict(weights)]
        dist.broadcast_object_list(found, src=0)
        if not found[0]:  # in all processes alike: gathering the present ones takes all of them
            found = [self.weights()]
            dist.broadcast_object_list(found, src=0)
        weights = {name: tensor.cpu() for name, tensor in found[0].items()}
        # Into both: `evaluate` measures what is placed, the caller gets the other.
        self._placed.load_state_dict(weights)
        self._plain.load_state_dict(weights)
        return self._plain

    def gather(self, value: Any) -> list[Any]:
        import torch.distributed as dist

        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, value)
        return found

    def state(
        self, optimizer: torch.optim.Optimizer, folder: Path, name: str, averages: Sequence[torch.Tensor] = ()
    ) -> dict[str, Any]:
        # Each process writes its part into a folder of this checkpoint's own; the file then says which one counts.
        self._placed.save(folder / name, optimizer, self._extra(averages))
        return {"shards": name}

    def restore(
        self,
        content: Mapping[str, Any],
        optimizer: torch.optim.Optimizer,
        folder: Path,
        averages: Sequence[torch.Tensor] = (),
    ) -> None:
        if "shards" in content:
            self._placed.load(folder / _shards(content, folder), optimizer, self._extra(averages))
            return
        set_whole(self.module, optimizer, content["module"], content["optimizer"], content["names"])
        for own, (name, parameter) in zip(averages, self.named_parameters().items()):
            own.copy_(local_part(part_of(parameter, content["averages"][name])))

    def set_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        # Groups of processes add theirs up, where PyTorch does not average them.
        share = 1 / self._placed.data_world if self._placed.adds_up else 1.0
        super().set_gradients({name: gradient * share for name, gradient in gradients.items()})

    def _extra(self, averages: Sequence[torch.Tensor]) -> dict[str, dict[str, torch.Tensor]] | None:
        own = self.named_parameters().items()
        return {"averages": {n: laid_as(p, each) for (n, p), each in zip(own, averages)}} if averages else None


SHARDS = "shards-"


def _shards(content: Mapping[str, Any], folder: Path) -> str:
    """The name of the folder of shards that a checkpoint's file points to."""
    name = content["shards"]
    if not isinstance(name, str) or Path(name).name != name:
        raise CheckpointError(f"{folder}: the checkpoint names {name!r} for its shards, which is no folder beside it")
    return name


def place(
    module: nn.Module,
    way: str,
    device: torch.device,
    compiled: bool,
    plain: Callable[[], nn.Module],
    planning: Mapping[str, Any] | None = None,
) -> Alone:
    """The module in this process, or over those that torchrun started.

    Arguments:
        module: on the CPU or the device.
        way: `TrainConfig.parallel`.
        device: where this process computes.
        compiled: whether torch.compile compiles the module.
        plain: makes a second module like it, for the result.
        planning: what `parallel.prepare` tells the planner: batch_size, cluster, optimizer, report.

    Each process begins with the weights of the first one, and draws random numbers of its own from then on.

    Raises TrainingError where several processes were started and the config does not say how they share the work.
    """
    from archipel.training.cloud.parallel import prepare, under_torchrun

    if way == "none" or (way == "auto" and not under_torchrun()):
        if under_torchrun() and _several():
            raise TrainingError(
                "parallel: torchrun started several processes, and each would train alone; set parallel='ddp', or "
                "start one process"
            )
        return Alone(module, compiled)
    if compiled:
        raise TrainingError("compile: does not go with parallel; leave one of them out")
    copy = plain()
    return Together(prepare(module, way, device=device, **(planning or {})), copy)


def _several() -> bool:
    import os

    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether every number in this process's parts is finite."""
    import torch

    return all(bool(torch.isfinite(local_part(tensor)).all()) for tensor in tensors)


def local_part(tensor: Any) -> torch.Tensor:
    """The part of a tensor that this process holds."""
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found
