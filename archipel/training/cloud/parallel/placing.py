"""The one entry: place a module over the processes in one of the ways."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from archipel.errors import MissingExtraError, TrainingError
from archipel.training.cloud.parallel.placed import Placed
from archipel.training.cloud.planner.division import divide

if TYPE_CHECKING:
    import torch
    from torch import fx, nn

WAYS = ("auto", "ddp", "fsdp", "tensor", "pipeline", "hybrid")


def prepare(
    module: nn.Module,
    way: str = "ddp",
    *,
    device: torch.device | str | None = None,
    microbatches: int | None = None,
    starts: list[str] | None = None,
    compute_dtype: torch.dtype | None = None,
) -> Placed:
    """Place `module` over all processes of the training, which `processes()` has joined.

    Arguments:
        module: an nn.Module, the same in each process: parameters and buffers of rank 0 are sent to all others.
        way: how.
            "ddp": a copy in each process, which reads its part of the batch; gradients are averaged.
            "fsdp": as "ddp", but parameters, gradients and optimizer state are divided, too.
            "tensor": parameters and the work on each example are divided; every process reads all examples.
            "pipeline": each process runs one part of the layers.
            "hybrid": "tensor" within groups, "ddp" between them.
            "auto": what the planner chooses.
        device: where this process computes; None: the current GPU if the processes exchange by NCCL, else the CPU.
        microbatches: of "pipeline", 1 or more; None: four for each process.
        starts: of "pipeline", names of the nodes of the traced graph that begin stages 1, 2, ...; None: stages of about
            equal work.
        compute_dtype: of "fsdp", the type in which parameters are gathered, such as torch.bfloat16; None: their own.

    Raises TrainingError for a way that the module or the number of processes does not allow, MissingExtraError without
    PyTorch.

    Example:
        placed = parallel.prepare(network, "fsdp")
        optimizer = torch.optim.AdamW(placed.parameters())
        loss = placed.step((images,), labels, functional.cross_entropy)
    """
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        raise MissingExtraError("torch", "cloud") from error
    if way not in WAYS:
        raise TrainingError(f"parallel must be one of {', '.join(WAYS)}, is {way!r}")
    if not dist.is_initialized():
        raise TrainingError("prepare expects processes that have joined: call it inside `with parallel.processes():`")
    if not isinstance(module, torch.nn.Module):
        raise TrainingError(f"prepare expects a torch.nn.Module, got {type(module).__name__}")
    from torch.distributed.device_mesh import init_device_mesh

    kind = "cuda" if dist.get_backend() == "nccl" else "cpu"
    where = torch.device(device) if device is not None else torch.device(kind, *_current(kind))
    world = dist.get_world_size()
    module = module.to(where)
    _send_from_first(module)
    mesh = init_device_mesh(kind, (world,), mesh_dim_names=("data",))
    if way == "ddp":
        from archipel.training.cloud.parallel.replicas import Replicas

        return Replicas(module, mesh, where)
    if way == "fsdp":
        from archipel.training.cloud.parallel.replicas import Shards

        return Shards(module, mesh, where, compute_dtype)
    if way == "tensor":
        from archipel.training.cloud.parallel.linears import ShardedLinears

        return ShardedLinears(module, mesh, where)
    if way == "pipeline":
        from archipel.training.cloud.parallel.stages import Stages

        graph = traced(module)
        count = 4 * world if microbatches is None else microbatches
        return Stages(graph, even_starts(graph, world) if starts is None else starts, mesh, where, count)
    raise TrainingError(
        f"parallel={way!r} needs a graph: give a TorchModule(model) in place of {type(module).__name__}"
    )


def _current(kind: str) -> tuple[int, ...]:
    import torch

    return (torch.cuda.current_device(),) if kind == "cuda" else ()


def _send_from_first(module: nn.Module) -> None:
    """Give all processes the parameters and buffers of rank 0."""
    import torch
    import torch.distributed as dist

    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.data, src=0)


def traced(module: nn.Module) -> fx.GraphModule:
    """The module's operators as a torch.fx graph. Raises TrainingError if torch.fx cannot trace it."""
    from torch import fx

    if isinstance(module, fx.GraphModule):
        return module
    try:
        return fx.symbolic_trace(module)
    except (fx.proxy.TraceError, TypeError, RuntimeError, ValueError, AttributeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TrainingError(
            f'parallel="pipeline" needs a graph, and torch.fx cannot trace {type(module).__name__} ({reason}); give '
            "TorchModule(Model.from_torch(module, example))"
        ) from error


def even_starts(graph: fx.GraphModule, stages: int) -> list[str]:
    """Names of the nodes that begin stages 1, 2, ... so that stages have about equal numbers of parameters."""
    nodes = [node for node in graph.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    weights = [_elements(graph, node) for node in nodes]
    try:
        return [nodes[index].name for index in divide(weights, stages)]
    except ValueError as error:
        raise TrainingError(
            f"a pipeline over {stages} processes needs {stages} operators with parameters of their own; start fewer "
            'processes, or use another way, such as "ddp"'
        ) from error


def _elements(graph: fx.GraphModule, node: Any) -> int:
    """Elements of the parameters that a node reads."""
    import torch

    if node.op == "call_module":
        return sum(parameter.numel() for parameter in graph.get_submodule(node.target).parameters())
    total = 0
    for source in node.all_input_nodes:
        if source.op == "get_attr":
            owner, _, name = source.target.rpartition(".")
            value = getattr(graph.get_submodule(owner), name)
            total += value.numel() if isinstance(value, torch.nn.Parameter) else 0
    return total
