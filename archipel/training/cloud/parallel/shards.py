"""A module and its optimizer in a folder: each process writes its shards, and any number of processes reads them.

PyTorch's own reader runs whatever a file of the folder names, as pickles do, and reads whatever file it names. This one
takes tensors, numbers, texts and PyTorch's tables of these out of the folder's own files, and nothing else.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from archipel.errors import CheckpointError
from archipel.library_errors import one_line

if TYPE_CHECKING:
    import torch
    from torch import nn

# Of an optimizer's group: how this process computes, not what.
_OWN = ("fused", "foreach", "capturable", "differentiable")
# What Python's unpickler raises for bytes that are no pickle.
_BROKEN = (EOFError, struct.error, ValueError, TypeError, AttributeError, LookupError, OverflowError, MemoryError)
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
    except (OSError, EOFError, RuntimeError, ValueError, TypeError, AttributeError, LookupError,
            pickle.UnpicklingError, checkpoint.api.CheckpointException) as error:  # fmt: skip
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
    cause = failures[0][0] if failures else error
    if isinstance(cause, pickle.UnpicklingError) and "weights_only" in str(cause):
        # PyTorch's text advises to load the file without the check, which would run the file's code.
        return "it holds more than tensors, numbers and texts"
    return one_line(cause)[:200]


class _Unpickler(pickle._Unpickler):
    """In Python, where one can look at what a state is given to."""

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def load_build(self) -> None:
        target = self.stack[-2]  # type: ignore[attr-defined]
        if callable(target):
            # It would change PyTorch's class or function, or Python's, in all of this process.
            raise pickle.UnpicklingError(f"its table of tensors changes {target!r}, which no checkpoint does")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:
        import torch

        if (module, name) in _ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"its table of tensors names {module}.{name}, which no checkpoint needs")


def _check_place(place: Any) -> None:
    name = getattr(place, "relative_path", None)
    plain = isinstance(name, str) and name not in ("", "..") and Path(name).name == name
    if not plain or place.transform_descriptors:
        raise pickle.UnpicklingError(f"its table of tensors names {name!r}, which is no file of the folder")


def _strict() -> tuple[type[Any], Any]:
    """PyTorch's reader and planner, without their ways to run code from a file."""
    import torch
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            try:
                found = _Unpickler(io.BytesIO((Path(self.path) / ".metadata").read_bytes())).load()
            except _BROKEN as error:
                raise pickle.UnpicklingError(f"its table of tensors is damaged ({one_line(error)})") from error
            if not isinstance(found, Metadata):
                raise pickle.UnpicklingError("it has no table of tensors")
            for place in (found.storage_data or {}).values():
                _check_place(place)
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
