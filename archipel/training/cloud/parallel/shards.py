"""A module and its optimizer in a folder: each process writes its shards, and any number of processes reads them.

PyTorch's own reader runs whatever a file of the folder names, as pickles do. This one takes tensors, numbers, texts and
PyTorch's tables of these, and nothing else.
"""

from __future__ import annotations

import io
import os
import pickle
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from archipel.errors import CheckpointError, one_line

if TYPE_CHECKING:
    import torch
    from torch import nn

# Of an optimizer's group: how this process computes, not what.
_OWN = ("fused", "foreach", "capturable", "differentiable")
_TABLES = "torch.distributed.checkpoint.metadata"
# What the file .metadata may name.
_ALLOWED = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch.serialization", "_get_layout"),
    ("torch", "Size"), ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"), ("pathlib", "WindowsPath"), ("pathlib._local", "PosixPath"),
    *((_TABLES, name) for name in (
        "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties",
        "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING",
    )),
}  # fmt: skip

Extra = Mapping[str, Mapping[str, "torch.Tensor"]]


def write_shards(
    folder: str | os.PathLike[str], module: nn.Module, optimizer: torch.optim.Optimizer, extra: Extra | None = None
) -> None:
    """Write them into a new folder. All processes call it together.

    Arguments:
        folder: of this checkpoint alone.
        module: as this process holds it; parameters may be DTensors.
        optimizer: of this module's parameters.
        extra: more tensors by kind and then by the parameter's name, laid as that parameter.

    Raises CheckpointError if it cannot be written.
    """
    from torch.distributed import checkpoint

    try:
        with _one_process_may():
            checkpoint.state_dict_saver.save(_state(module, optimizer) | dict(extra or {}), checkpoint_id=str(folder))
    except (OSError, checkpoint.api.CheckpointException) as error:
        raise CheckpointError(f"cannot write the checkpoint {folder}: {_reason(error)}") from error


def read_shards(
    folder: str | os.PathLike[str], module: nn.Module, optimizer: torch.optim.Optimizer, extra: Extra | None = None
) -> None:
    """Read what `write_shards` wrote, in one process or several, placed in whatever way; `extra` is read in place.

    Raises CheckpointError if it cannot be read.
    """
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    reader, planner = _strict()
    if not (Path(folder) / ".metadata").is_file():
        raise CheckpointError(f"{folder} is no complete checkpoint: it has no .metadata; name another folder")
    found = reader(str(folder))
    state = _state(module, optimizer) | dict(extra or {})
    own = {key: value for key, value in state["optimizer"].items() if key.rpartition(".")[2] in _OWN}
    try:
        found.read_metadata()  # first, as PyTorch logs a traceback where it cannot
        with _one_process_may():
            checkpoint.state_dict_loader.load(state, storage_reader=found, planner=planner)
        set_state_dict(
            module,
            optimizer,
            model_state_dict=state["module"],
            optim_state_dict=state["optimizer"] | own,
            options=StateDictOptions(flatten_optimizer_state_dict=True),
        )
    except (OSError, RuntimeError, ValueError, KeyError, pickle.UnpicklingError,
            checkpoint.api.CheckpointException) as error:  # fmt: skip
        raise CheckpointError(f"the checkpoint {folder} cannot be read: {_reason(error)}") from error


def set_whole(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    weights: Mapping[str, torch.Tensor],
    state: Mapping[str, Any],
    names: Sequence[str],
) -> None:
    """Give a placed module and its optimizer what one process had.

    Arguments:
        module, optimizer: as this process holds them.
        weights: the whole `state_dict` of the module.
        state: the `state_dict` of an optimizer of all its parameters.
        names: of these parameters, in the optimizer's order.

    Raises KeyError, ValueError and RuntimeError for other parameters.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_state_dict

    own = set(dict(module.named_parameters()))
    kept = {key: optimizer.param_groups[0][key] for key in _OWN if key in optimizer.param_groups[0]}
    groups = []
    for group in state["param_groups"]:
        mine = [names[index] for index in group["params"] if names[index] in own]
        if mine:
            groups.append({**group, **kept, "params": mine})
    values = {names[index]: value for index, value in state["state"].items() if names[index] in own}
    set_state_dict(
        module,
        optimizer,
        model_state_dict={name: weights[name] for name in get_model_state_dict(module)},
        optim_state_dict={"state": values, "param_groups": groups},
        options=StateDictOptions(full_state_dict=True),
    )


def names_in_order(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of the optimizer's parameters, in the order of its state's numbers."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [names.get(id(parameter), "") for group in optimizer.param_groups for parameter in group["params"]]


def laid_as(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor, as the whole that is laid as the parameter; they share memory."""
    if not hasattr(parameter, "placements"):
        return local
    from torch.distributed.tensor import DTensor

    laid: Any = parameter
    return DTensor.from_local(
        local, laid.device_mesh, laid.placements, run_check=False, shape=laid.shape, stride=laid.stride()
    )


def part_of(parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """A whole tensor, laid as the parameter. All processes of its mesh call it together."""
    if not hasattr(parameter, "placements"):
        return whole.to(parameter.device)
    from torch.distributed.tensor import distribute_tensor

    laid: Any = parameter
    return distribute_tensor(whole.to(parameter.device), laid.device_mesh, laid.placements)


def _state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    # Flat: each value of the optimizer has a name of its own, so that stages add up to one checkpoint.
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    tensors, state = get_state_dict(module, optimizer, options=options)
    return {"module": tensors, "optimizer": state}


@contextmanager
def _one_process_may() -> Iterator[None]:
    """A context in which PyTorch does not warn of a process that is alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _reason(error: BaseException) -> str:
    failures = list(getattr(error, "failures", {}).values())  # of CheckpointException: one for each process
    return one_line(failures[0][0] if failures else error)[:200]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        import torch

        if (module, name) in _ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"its table of tensors names {module}.{name}, which no checkpoint needs")


def _strict() -> tuple[type[Any], Any]:
    """PyTorch's reader and planner, without their ways to run code from a file."""
    import torch
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            found = _Unpickler(io.BytesIO((Path(self.path) / ".metadata").read_bytes())).load()
            if not isinstance(found, Metadata):
                raise pickle.UnpicklingError("it has no table of tensors")
            found.storage_meta = found.storage_meta or StorageMeta()
            found.storage_meta.load_id = self.load_id
            return found

    class Planner(DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            *tables, name = self.mappings[read_item.dest_index.fqn]
            place: Any = self.original_state_dict
            for table in tables:
                place = place[table]
            place[name] = torch.load(value, weights_only=True)

    return Reader, Planner()
