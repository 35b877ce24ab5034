"""From a batch of arrays to the call of a module: which fields are its inputs, in which order and type."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from archipel.errors import TrainingError
from archipel.graph.model import Model
from archipel.training.cloud.graphs.index_limits import check_indices, find_index_limits
from archipel.training.cloud.objective.objective import NEXT_TOKEN

if TYPE_CHECKING:
    import torch
    from torch import nn


class Feed:
    """Moves batches to the device and calls the module with its inputs.

    Arguments:
        module: what is called.
        fields: the names of the data's fields.
        labels: those that are labels; one may be an input, too, if `inputs` names it or nothing else is left.
        inputs: the fields that are inputs, in the module's order; empty: all that are no labels.
        graph_inputs: names of the inputs, where the module runs a graph.
        next_token: make labels of the input's next places.

    Raises TrainingError for a field that is not there, and inputs that do not fit the graph's.
    """

    def __init__(
        self,
        module: nn.Module,
        fields: Sequence[str],
        labels: Sequence[str],
        inputs: Sequence[str] = (),
        graph_inputs: Sequence[str] = (),
        next_token: bool = False,
    ) -> None:
        import torch

        for name in inputs:
            if name not in fields:
                raise TrainingError(f"inputs: the data have no field {name!r}; they have {', '.join(fields)}")
        parameter = next((p for p in module.parameters() if p.is_floating_point()), None)
        self._dtype = torch.float32 if parameter is None else parameter.dtype
        chosen = list(inputs) or [name for name in fields if name not in labels] or list(labels)
        self.inputs = _ordered(module, chosen, graph_inputs)
        source = getattr(module, "source", None)
        limits = find_index_limits(source) if isinstance(source, Model) else {}
        self._limits = {field: limits[name] for field, name in zip(self.inputs, graph_inputs) if name in limits}
        self.labels = [name for name in labels if name not in (*self.inputs, NEXT_TOKEN)]
        self.next_token = next_token
        self.layout = torch.contiguous_format
        self.used = (*self.inputs, *self.labels)

    def tensors(
        self, batch: Mapping[str, NDArray[Any] | torch.Tensor], device: torch.device
    ) -> dict[str, torch.Tensor]:
        """The inputs and labels of a batch on the device, with other fields for a loss that reads them."""
        tensors = {name: self._tensor(name, values, device) for name, values in batch.items()}
        if self.next_token:
            tokens = tensors[self.inputs[0]]
            if tokens.ndim < 2 or tokens.shape[1] < 2:
                raise TrainingError(
                    f"next_token: needs sequences [batch, 2 or more tokens, ...], the field {self.inputs[0]!r} has "
                    f"{list(tokens.shape)}"
                )
            tensors[NEXT_TOKEN] = tokens[:, 1:]
            tensors[self.inputs[0]] = tokens[:, :-1]
        return tensors

    def arguments(self, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """What the module is called with."""
        return tuple(self._laid_out(tensors[name]) for name in self.inputs)

    def _laid_out(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous(memory_format=self.layout) if tensor.ndim == 4 else tensor

    def _tensor(self, name: str, values: NDArray[Any] | torch.Tensor, device: torch.device) -> torch.Tensor:
        import torch

        tensor = values if isinstance(values, torch.Tensor) else _from_numpy(values)
        if tensor.is_floating_point():
            dtype: torch.dtype = self._dtype
        else:
            dtype = tensor.dtype if tensor.dtype in (torch.bool, torch.int32) else torch.int64
        if device.type == "cuda" and not tensor.is_cuda:
            if name in self._limits:
                check_indices(name, tensor, self._limits[name])
            tensor = tensor.pin_memory()
        # From pinned memory the copy runs beside the device's computations.
        return tensor.to(device, dtype, non_blocking=True)


def _from_numpy(array: NDArray[Any]) -> torch.Tensor:
    import torch

    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)  # PyTorch's other unsigned types have few operators
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


def _ordered(module: nn.Module, fields: list[str], graph_inputs: Sequence[str]) -> list[str]:
    if graph_inputs:
        if all(name in fields for name in graph_inputs):
            return list(graph_inputs)
        if len(fields) == len(graph_inputs):
            return fields
        raise TrainingError(
            f"inputs: the model takes {', '.join(graph_inputs)}, the data have {', '.join(fields)}; name the fields "
            "like the inputs, or give inputs= in the model's order"
        )
    # By name where the fields are called like the arguments of `forward`; otherwise in the order of the fields.
    parameters = [name for name in inspect.signature(module.forward).parameters if name in fields]
    return parameters if len(fields) > 1 and len(parameters) == len(fields) else fields
