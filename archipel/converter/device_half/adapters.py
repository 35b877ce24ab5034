"""Low-rank adapters as graph surgery: a weight W becomes W + alpha / rank * B A, with W a constant (Hu et al. 2022)."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from archipel.bundle.roles import State
from archipel.compression.layer_weights import layer_weights
from archipel.converter.device_half.adapter_forms import LAYERS, Form, find_form, static
from archipel.converter.device_half.replaced import Adapted, insert
from archipel.converter.device_half.roles import select
from archipel.errors import ConversionError
from archipel.graph import Builder, Model
from archipel.graph.parameters import parameter_names, record_parameters, trainable_names
from archipel.strategies.device import Adapters


@dataclass(frozen=True)
class Adapter:
    """The adapter of one weight of that `shape`, whose `form` says how it counts as a matrix [rows, columns].

    A (`a`) reads the layer's input, B (`b`) makes its output. Where the rows are the outputs, the change is B A with B
    [rows, rank] and A [rank, columns]. Else it is A B with A [rows, rank] and B [rank, columns].
    """

    weight: str
    shape: tuple[int, ...]
    form: Form
    rank: int
    scale: float

    @property
    def a(self) -> str:
        return f"{self.weight}.lora_a"

    @property
    def b(self) -> str:
        return f"{self.weight}.lora_b"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of A and B, by name; a stack of matrices has a stack of each."""
        *stack, rows, columns = self.form.matrix
        left, right = (*stack, rows, self.rank), (*stack, self.rank, columns)
        return {self.a: right, self.b: left} if self.form.outputs_first else {self.a: left, self.b: right}

    @property
    def reads(self) -> tuple[State, ...]:
        """Nothing but the tensors of `shapes`."""
        return ()

    def initial(self, seed: int) -> dict[str, np.ndarray]:
        """The first values, with which nothing changes yet.

        A of a layer is uniform within 1 / sqrt(fan in), as PyTorch's linear layers, and B zero. Of an embedding, A is
        zero and B normal, as in the paper's own code: so training moves the rows of the tokens that occur, no others.
        """
        # By the weight's name: adapters differ from each other, but do not depend on which others there are.
        generator = np.random.default_rng([seed, zlib.crc32(self.weight.encode())])
        shapes = self.shapes
        if self.form.lookup:
            drawn = generator.standard_normal(shapes[self.b]).astype(np.float32)
            return {self.a: np.zeros(shapes[self.a], np.float32), self.b: drawn}
        bound = 1.0 / math.sqrt(shapes[self.a][-1 if self.form.outputs_first else -2])
        first = generator.uniform(-bound, bound, shapes[self.a]).astype(np.float32)
        return {self.a: first, self.b: np.zeros(shapes[self.b], np.float32)}

    def merge(self, op: Builder, weight: ir.Value, values: Mapping[str, ir.Value]) -> ir.Value:
        """Emit the weight with its change, in the weight's shape; `values` are A and B by name."""
        left, right = (self.b, self.a) if self.form.outputs_first else (self.a, self.b)
        change = op.MatMul(values[left], values[right])
        if self.shape != self.form.matrix:  # a kernel, with its spatial axes among the rows or columns
            change = op.Reshape(change, list(self.shape))
        return op.Add(weight, change if self.scale == 1.0 else op.Mul(change, self.scale))


def adapt(model: Model, options: Adapters, trainable: str | Sequence[str], strategy: str) -> Adapted:
    """Adapters on the weights that match both `trainable` and the options' targets; the graph is a copy.

    Raises ConversionError where no weight of such a layer matches, or a pattern matches nothing.
    """
    names = trainable_names(model.ir, trainable)
    full = select(names, options.full, strategy, "full")
    weights = {weight.name: weight for weight in layer_weights(model)}
    adapters = []
    for name in select(names, options.targets, strategy, "targets"):
        value = model.ir.graph.initializers[name]
        # A pattern like "*" also matches biases and scales: they get no adapter, and so do not train.
        if name in full or value.dtype != ir.DataType.FLOAT:
            continue
        form = find_form(value, weights.get(name))
        if form is not None:
            # A higher rank than the matrix has adds nothing. The scale stays alpha / (the rank that was asked for).
            rank = min(options.rank, *form.matrix[-2:])
            adapters.append(Adapter(name, static(value), form, rank, options.alpha / options.rank))
    if not adapters:
        raise ConversionError(
            f"strategy {strategy!r}: targets {list(options.targets)} match no float32 weight of {', '.join(LAYERS)}; "
            f"the trainable tensors are {', '.join(names)}"
        )
    result = model.copy()
    for adapter in adapters:
        insert(result, adapter, adapter.initial(options.seed))
    # `step_graph` trains only tensors that the model knows as its parameters.
    record_parameters(result.ir, [*parameter_names(model.ir), *(n for adapter in adapters for n in adapter.shapes)])
    return Adapted(result, tuple(adapters), tuple(full))
