"""The inputs on which a PyTorch source and its import are compared, and the source's answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from archipel.errors import ModelImportError
from archipel.graph.model import Model

if TYPE_CHECKING:
    import torch


def as_tensors(example: Any, dynamic_batch: bool) -> tuple[torch.Tensor, ...]:
    """The example as tensors on the CPU, two or more in a batch that is to be dynamic. Raises ModelImportError."""
    import torch

    given = tuple(example) if isinstance(example, tuple | list) else (example,)
    examples = tuple(torch.from_numpy(np.array(value)) if isinstance(value, np.ndarray) else value for value in given)
    for tensor in examples:
        if not isinstance(tensor, torch.Tensor):
            raise ModelImportError(f"example: expected tensors or NumPy arrays, got {type(tensor).__name__}")
    examples = tuple(tensor.detach().cpu() for tensor in examples)
    if not dynamic_batch:
        return examples
    sizes = {tensor.shape[0] for tensor in examples if tensor.ndim}
    if len(sizes) != 1 or 0 in sizes:
        raise ModelImportError(
            f"example: the first axis of every tensor is the batch, but the sizes are {sorted(sizes)}; "
            "make them equal, or pass dynamic_batch=False"
        )
    if sizes == {1}:
        # The exporter takes a size of 1 for a fixed one.
        examples = tuple(torch.cat([tensor, tensor]) if tensor.ndim else tensor for tensor in examples)
    return examples


def noise(examples: tuple[torch.Tensor, ...], seed: int) -> tuple[torch.Tensor, ...]:
    """Inputs of the same shapes: floats with the example's mean and spread, the rest shifted along the first axis."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for tensor in examples:
        if tensor.is_floating_point() and tensor.numel():
            mean, spread = tensor.double().mean(), tensor.double().std(correction=0)
            drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            tensors.append((mean + (spread if spread > 0 else 1.0) * drawn).to(tensor.dtype))
        else:
            # Integers may be indices: only those of the example are sure to be in range.
            tensors.append(tensor.roll(seed + 1, 0) if tensor.ndim else tensor)
    return tuple(tensors)


def is_constant(examples: tuple[torch.Tensor, ...]) -> bool:
    """Whether all elements of every float tensor are equal: a normalization then divides by about 0.

    That makes rounding errors as large as the answers, so such an example cannot tell a good import from a bad one.
    """
    floats = [tensor for tensor in examples if tensor.is_floating_point() and tensor.numel()]
    return bool(floats) and all(bool((tensor == tensor.flatten()[0]).all()) for tensor in floats)


def answers(module: torch.nn.Module, examples: tuple[torch.Tensor, ...]) -> list[np.ndarray]:
    """The module's outputs in order; it gets copies, because it may write into its inputs."""
    return _flat(module(*(tensor.clone() for tensor in examples)))


def as_feed(model: Model, examples: Sequence[torch.Tensor]) -> dict[str, np.ndarray]:
    """The examples as arrays by the names of the import's inputs."""
    return {port.name: tensor.numpy() for port, tensor in zip(model.inputs, examples)}


def _flat(outputs: Any) -> list[np.ndarray]:
    if isinstance(outputs, tuple | list):
        return [array for output in outputs for array in _flat(output)]
    if isinstance(outputs, dict):
        return [array for output in outputs.values() for array in _flat(output)]
    if not hasattr(outputs, "detach"):
        raise ModelImportError(f"the module returns {type(outputs).__name__}; only tensors can be exported")
    array: np.ndarray = outputs.detach().numpy()
    return [array]
