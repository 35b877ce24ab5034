"""The one entry: place a module over the processes in one of the ways."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from archipel.errors import ArchipelError, MissingExtraError, TrainingError
from archipel.training.cloud.parallel.linears import ShardedLinears
from archipel.training.cloud.parallel.placed import Placed
from archipel.training.cloud.parallel.replicas import Replicas, Shards
from archipel.training.cloud.parallel.stages import Stages
from archipel.training.cloud.planner.cluster import Cluster, read_cluster, write_cluster
from archipel.training.cloud.planner.costs import costs
from archipel.training.cloud.planner.division import divide, keep_together
from archipel.training.cloud.planner.plan import Alternative, chosen_way, plan

if TYPE_CHECKING:
    import torch
    from torch import fx, nn

    from archipel.training.cloud.graphs.torch_module import TorchModule

WAYS = ("auto", "ddp", "fsdp", "tensor", "pipeline", "hybrid")


def prepare(
    module: nn.Module,
    way: str = "ddp",
    *,
    device: torch.device | str | None = None,
    batch_size: int | None = None,
    cluster: Cluster | str | os.PathLike[str] | None = None,
    optimizer: str = "adam",
    microbatches: int | None = None,
    compute_dtype: torch.dtype | None = None,
    segment_bytes: int | None = None,
    sync_batch_norm: bool = False,
    report: Callable[[str], None] | None = None,
) -> Placed:
    """Place `module` over all processes of the training, which `processes()` has joined.

    Arguments:
        module: a TorchModule, or another nn.Module, the same in each process: parameters and buffers of rank 0 are sent
            to all others. Afterwards use `Placed.module` in its place.
        way: how.
            "ddp": a copy in each process, which reads its part of the batch; gradients are averaged.
            "fsdp": as "ddp", but parameters, gradients and optimizer state are divided, too.
            "tensor": parameters and the work on each example are divided; every process reads all examples. Of a
                TorchModule all operators that the planner can divide, of an nn.Module its Linear layers.
            "pipeline": each process runs one part of the layers.
            "hybrid": "tensor" within groups, "ddp" between them. Needs a TorchModule.
            "auto": what the planner predicts to be fastest among these and divisions of its own; "ddp" for what is no
                TorchModule, since it reads the graph.
        device: where this process computes; None: the current GPU if the processes exchange by NCCL, else the CPU.
        batch_size: examples of a whole batch, for the planner. A TorchModule needs it for all but "ddp" and "fsdp".
        cluster: for the planner: the cluster, or the path of its TOML file, which is written with measurements if it
            does not exist; None: it is measured, which takes seconds.
        optimizer: for the planner: "sgd", "momentum", "adam" or "adamw".
        microbatches: of "pipeline", 1 or more; None: four for each process, or as many as divide the batch.
        compute_dtype: of "fsdp", the type in which parameters are gathered, such as torch.bfloat16; None: their own.
        segment_bytes: of "fsdp" of a TorchModule: bytes of parameters that are gathered together at least, 1 or more;
            None: 32 MiB.
        sync_batch_norm: of "ddp" and "fsdp": normalize by the statistics of the whole batch, as one process does, at
            one exchange for each batch normalization and pass; else by those of this process's part.
        report: is given the planner's table, or why there is none, on rank 0.

    Raises TrainingError for a way that the module or the number of processes does not allow, MissingExtraError without
    PyTorch.

    Example:
        placed = parallel.prepare(TorchModule(model), "auto", batch_size=512, report=print)
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
    _check_sync(way in ("auto", "ddp", "fsdp"), way, sync_batch_norm)
    from torch.distributed.device_mesh import init_device_mesh

    from archipel.training.cloud.graphs.torch_module import TorchModule

    kind = "cuda" if dist.get_backend() == "nccl" else "cpu"
    where = torch.device(device) if device is not None else torch.device(kind, *_current(kind))
    world = dist.get_world_size()
    module = module.to(where)
    _send_from_first(module)
    if isinstance(module, TorchModule) and way not in ("ddp", "fsdp"):
        if batch_size is None:
            raise TrainingError(f"parallel={way!r} is planned for a batch size: give batch_size")
        found = _planned(module, way, where, batch_size, cluster, optimizer, microbatches, report)
        _check_sync(not (found.strategies or found.starts), f"{found.name} of the plan", sync_batch_norm)
        if found.strategies:
            from archipel.training.cloud.parallel.divided import Divided

            grid = init_device_mesh(kind, (found.groups, found.devices), mesh_dim_names=("data", "model"))
            units = costs(module.source, batch_size).units
            return Divided(module, units, found.strategies, grid, where, way)
        mesh = init_device_mesh(kind, (world,), mesh_dim_names=("data",))
        if found.starts:
            return Stages(module, node_starts(module, found.starts), mesh, where, found.microbatches)
        way = "fsdp" if found.name == "fsdp" else "ddp"
    mesh = init_device_mesh(kind, (world,), mesh_dim_names=("data",))
    if way == "auto" and dist.get_rank() == 0:
        tell = report or partial(print, file=sys.stderr)
        tell(f"parallel: 'auto' plans graphs alone, and takes 'ddp' for {type(module).__name__}")
    if way in ("auto", "ddp", "fsdp"):
        from archipel.training.cloud.parallel.statistics import share_statistics

        shared = share_statistics(module, mesh.get_group()) if sync_batch_norm else None
        placed = (
            Shards(module, mesh, where, compute_dtype, segment_bytes)
            if way == "fsdp"
            else Replicas(module, mesh, where)
        )
        placed.statistics = shared
        return placed
    if way == "tensor":
        return ShardedLinears(module, mesh, where)
    if way == "pipeline":
        graph = traced(module)
        return Stages(
            graph, even_starts(graph, world), mesh, where, 4 * world if microbatches is None else microbatches
        )
    raise TrainingError(
        f"parallel={way!r} needs a graph: give a TorchModule(model) in place of {type(module).__name__}"
    )


def _check_sync(possible: bool, way: str, sync_batch_norm: bool) -> None:
    if sync_batch_norm and not possible:
        raise TrainingError(
            f"sync_batch_norm goes with parallel 'ddp' and 'fsdp', not with {way!r}; choose one of them, or leave it "
            "out"
        )


def _planned(
    module: TorchModule,
    way: str,
    device: torch.device,
    batch_size: int,
    cluster: Cluster | str | os.PathLike[str] | None,
    optimizer: str,
    microbatches: int | None,
    report: Callable[[str], None] | None,
) -> Alternative:
    """The alternative that rank 0 finds, the same in each process. Raises TrainingError, in each, if it is refused."""
    import torch.distributed as dist

    if cluster is None or (not isinstance(cluster, Cluster) and not Path(cluster).exists()):
        from archipel.training.cloud.planner.measure import measure_cluster

        measured = measure_cluster(device, layout=_layout(module))
        if cluster is not None and dist.get_rank() == 0:
            write_cluster(measured, cluster)
        cluster = measured
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            known = cluster if isinstance(cluster, Cluster) else read_cluster(cluster)
            if known.devices != dist.get_world_size():
                raise TrainingError(
                    f"the cluster has {known.devices} devices and this training {dist.get_world_size()} processes; "
                    "start one for each device, or correct the cluster file"
                )
            found = plan(module.source, known, batch_size, optimizer, microbatches)
            if report is not None:
                report(found.table())
            chosen = found[way]
            if way == "auto":
                chosen = msgspec.structs.replace(chosen, name=chosen_way(found))
            answer[0] = chosen if not chosen.refused else f"parallel={way!r} cannot be taken: {chosen.refused}"
        except ArchipelError as error:
            answer[0] = str(error)
    # Whoever decides for all tells all, also that it cannot: nobody waits for a process that has ended.
    dist.broadcast_object_list(answer, src=0, device=device)
    if isinstance(answer[0], str):
        raise TrainingError(answer[0])
    decided: Alternative = answer[0]
    return decided


def node_starts(module: TorchModule, starts: Sequence[str]) -> list[str]:
    """Names of the traced nodes that begin what the plan says begins with these nodes of the graph."""
    from archipel.training.cloud.graphs.stepping import ONNX_NODE
    from archipel.training.cloud.parallel.cuts import movable

    order = list(module.source.ir.graph)
    place = {str(node.name or node.outputs[0].name): index for index, node in enumerate(order)}
    found = list[str]()
    for start in starts:
        for node in movable(module):
            traced = node.meta.get(ONNX_NODE)
            # A node that PyTorch computes with others stands where the last of them does.
            if traced is not None and place[str(traced.name or traced.outputs[0].name)] >= place[start]:
                found.append(node.name)
                break
    if len(set(found)) < len(starts):
        raise TrainingError("two stages of the pipeline begin with one function of PyTorch's; start fewer processes")
    return found


def _layout(module: nn.Module) -> torch.memory_format:
    """How the module's pictures lie: as the weights of its convolutions do."""
    import torch

    kernels = [parameter for parameter in module.parameters() if parameter.ndim == 4 and parameter.shape[1] > 1]
    last = [kernel.is_contiguous(memory_format=torch.channels_last) for kernel in kernels]
    return torch.channels_last if last and all(last) else torch.contiguous_format


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
    """Names of the nodes that begin stages 1, 2, ... so that stages have about equal numbers of parameters.

    A parameter that several nodes read lies in one stage, with them and all between.
    """
    nodes = [node for node in graph.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    read = [_parameters(graph, node) for node in nodes]
    weights = keep_together([sum(p.numel() for p in found) for found in read], read)
    try:
        return [nodes[index].name for index in divide(weights, stages)]
    except ValueError as error:
        tied = any(count > 1 for count in Counter(p for found in read for p in found).values())
        reason = "; what several read, such as tied embeddings, must lie in one stage with all between" if tied else ""
        raise TrainingError(
            f"a pipeline over {stages} processes needs {stages} operators with parameters of their own{reason}; start "
            'fewer processes, or use another way, such as "ddp"'
        ) from error


def _parameters(graph: fx.GraphModule, node: Any) -> set[nn.Parameter]:
    """The parameters that a node reads."""
    import torch

    if node.op == "call_module":
        return set(graph.get_submodule(node.target).parameters())
    found = set[torch.nn.Parameter]()
    for source in node.all_input_nodes:
        if source.op == "get_attr":
            owner, _, name = source.target.rpartition(".")
            value = getattr(graph.get_submodule(owner), name)
            if isinstance(value, torch.nn.Parameter):
                found.add(value)
    return found
