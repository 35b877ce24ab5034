"""Several models in one graph: each trained parameter becomes a stack, of which the graph reads one slice."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from archipel.bundle.roles import State
from archipel.converter.device_half.replaced import Adapted, add_initializer, insert
from archipel.errors import ConversionError
from archipel.graph import Builder, Model
from archipel.graph.parameters import parameter_names, record_parameters, trainable_names
from archipel.graph.passes import remove_dead_code
from archipel.strategies.device import CHOICE, STACK, Models
from archipel.strategies.program import choice_state
from archipel.training.batch_norm import BatchNorm, statistics_of_layers


@dataclass(frozen=True)
class Stack:
    """`count` models' versions of the parameter `weight`, which has that `shape`."""

    weight: str
    shape: tuple[int, ...]
    count: int

    @property
    def name(self) -> str:
        return self.weight + STACK

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {self.name: (self.count, *self.shape)}

    @property
    def reads(self) -> tuple[State, ...]:
        """The number of the model in use."""
        return (choice_state(),)

    def initial(self, first: np.ndarray, spread: float, seed: int) -> dict[str, np.ndarray]:
        """The first values, as `strategies.device.Models` says."""
        # By the weight's name: a tensor's values do not depend on which others there are.
        generator = np.random.default_rng([seed, zlib.crc32(self.weight.encode())])
        size = math.sqrt(float(np.square(first, dtype=np.float64).mean())) if first.size else 0.0
        drawn = spread * size * generator.standard_normal((self.count, *self.shape))
        values = math.sqrt(1 - spread**2) * first.astype(np.float64) + drawn
        values[0] = first
        return {self.name: values.astype(first.dtype)}

    def merge(self, op: Builder, weight: ir.Value, values: Mapping[str, ir.Value]) -> ir.Value:
        """Emit the slice of the model in use; the weight's own first value counts for nothing."""
        return op.Gather(values[self.name], values[CHOICE], axis=0)


def stack(
    model: Model, options: Models, trainable: str | Sequence[str], batch_norm: BatchNorm, strategy: str
) -> Adapted:
    """Several models in one graph, a copy of the model's; the initializer CHOICE says which of them it computes.

    Raises ConversionError for BatchNormalization that trains, since each model would have statistics of its own.
    """
    if batch_norm == "train" and statistics_of_layers(model):
        raise ConversionError(
            f"step_options: strategy {strategy!r} has several models, whose BatchNormalization would have to have the "
            "statistics of each; choose batch_norm='frozen' or use GroupNorm"
        )
    result, first = model.copy(), model.parameters
    names = trainable_names(model.ir, trainable)
    add_initializer(Builder(result.ir.graph), CHOICE, np.zeros((), np.int64))
    stacks = tuple(Stack(name, first[name].shape, options.count) for name in names)
    for each in stacks:
        insert(result, each, each.initial(first[each.weight], options.spread, options.seed))
    record_parameters(result.ir, [*parameter_names(model.ir), *(each.name for each in stacks)])
    # The weights themselves, which nothing reads any more.
    remove_dead_code(result.ir)
    return Adapted(result, stacks, ())
