"""Low-rank adapters as graph surgery: a weight W becomes W + alpha / rank * B A, with W a constant (Hu et al. 2022)."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import onnx_ir as ir

from archipel.bundle.roles import Parameter
from archipel.compression.deploy import evaluate_constants
from archipel.compression.layer_weights import LayerWeight, layer_weights
from archipel.converter.roles import select
from archipel.errors import ConversionError
from archipel.graph import Builder, Model
from archipel.graph.parameters import parameter_names, record_parameters, trainable_names
from archipel.graph.passes import remove_dead_code
from archipel.graph.shapes import dims
from archipel.strategies.device import Adapters

_LAYERS = ("Gemm", "MatMul", "Conv", "ConvTranspose")


@dataclass(frozen=True)
class Adapter:
    """The adapter of one weight, which counts as a matrix [rows, columns]: some first axes together, then the others.

    A (`a`) reads the layer's input, B (`b`) makes its output. With `outputs_first` the rows are the outputs, and the
    change is B A with B [rows, rank] and A [rank, columns]. Else it is A B with A [rows, rank] and B [rank, columns].
    """

    weight: str
    shape: tuple[int, ...]
    matrix: tuple[int, int]
    outputs_first: bool
    rank: int
    scale: float

    @property
    def a(self) -> str:
        return f"{self.weight}.lora_a"

    @property
    def b(self) -> str:
        return f"{self.weight}.lora_b"

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """The shapes of A and B, by name."""
        left, right = (self.matrix[0], self.rank), (self.rank, self.matrix[1])
        return {self.a: right, self.b: left} if self.outputs_first else {self.a: left, self.b: right}

    def initial(self, seed: int) -> dict[str, np.ndarray]:
        """The first values: A uniform within 1 / sqrt(fan in), as PyTorch's linear layers, B zero, so no change yet."""
        rows, columns = self.shapes[self.a]
        bound = 1.0 / math.sqrt(columns if self.outputs_first else rows)
        # By the weight's name: adapters differ from each other, but do not depend on which others there are.
        generator = np.random.default_rng([seed, zlib.crc32(self.weight.encode())])
        first = generator.uniform(-bound, bound, (rows, columns)).astype(np.float32)
        return {self.a: first, self.b: np.zeros(self.shapes[self.b], np.float32)}

    def merge(self, op: Builder, weight: ir.Value, values: Mapping[str, ir.Value]) -> ir.Value:
        """Emit the weight with its change, in the weight's shape; `values` are A and B by name."""
        left, right = (self.b, self.a) if self.outputs_first else (self.a, self.b)
        change = op.MatMul(values[left], values[right])
        if self.shape != self.matrix:  # a kernel, with its spatial axes among the rows or columns
            change = op.Reshape(change, list(self.shape))
        return op.Add(weight, change if self.scale == 1.0 else op.Mul(change, self.scale))


@dataclass(frozen=True)
class Adapted:
    """A model with adapters. `trained` are the tensors that train: those of adapters, and `full` weights."""

    model: Model
    adapters: tuple[Adapter, ...]
    full: tuple[str, ...]

    @property
    def trained(self) -> list[str]:
        return [*(name for adapter in self.adapters for name in adapter.shapes), *self.full]

    @property
    def derived(self) -> list[str]:
        """The tensors of the original model whose values change with training."""
        return [*(adapter.weight for adapter in self.adapters), *self.full]


def adapt(model: Model, options: Adapters, trainable: str | Sequence[str], strategy: str) -> Adapted:
    """Adapters on the weights that match both `trainable` and the options' targets; the graph is a copy.

    Raises ConversionError where no weight of such a layer matches, or a pattern matches nothing.
    """
    names = trainable_names(model.ir, trainable)
    full = select(names, options.full, strategy, "full")
    weights = {weight.name: weight for weight in layer_weights(model)}
    adapters = []
    for name in select(names, options.targets, strategy, "targets"):
        weight = weights.get(name)
        # A pattern like "*" also matches biases and embeddings: they get no adapter, and so do not train.
        if weight is None or name in full or weight.content.dtype != np.float32:
            continue
        form = _matrix_form(weight)
        if form is not None:
            matrix, outputs_first = form
            # A higher rank than the matrix has adds nothing. The scale stays alpha / (the rank that was asked for).
            rank = min(options.rank, *matrix)
            scale = options.alpha / options.rank
            adapters.append(Adapter(name, weight.content.shape, matrix, outputs_first, rank, scale))
    if not adapters:
        raise ConversionError(
            f"strategy {strategy!r}: targets {list(options.targets)} match no float32 weight of {', '.join(_LAYERS)}; "
            f"the trainable tensors are {', '.join(names)}"
        )
    result = model.copy()
    for adapter in adapters:
        _insert(result, adapter, options.seed)
    # `step_graph` trains only tensors that the model knows as its parameters.
    record_parameters(result.ir, [*parameter_names(model.ir), *(n for adapter in adapters for n in adapter.shapes)])
    return Adapted(result, tuple(adapters), tuple(full))


def merge_into(refresh: Model, adapters: Sequence[Adapter], base: Mapping[str, np.ndarray]) -> Model:
    """A refresh program that reads the adapters in place of their weights. Changes the program's graph.

    `base` has the fixed weights by name.
    """
    signature, graph = refresh.program, refresh.ir.graph
    op = Builder(graph, scope="merge")
    ports = {port.name: port for port in signature.inputs}
    initial = dict(refresh.initial)
    with op.before(graph[0]):
        for adapter in adapters:
            weight = next(value for value in graph.inputs if value.name == adapter.weight)
            graph.inputs.remove(weight)
            del ports[adapter.weight], initial[adapter.weight]
            weight.name = op.unique(f"{adapter.weight}.merged")
            values = {name: op.input(name, ir.DataType.FLOAT, shape) for name, shape in adapter.shapes.items()}
            merged = adapter.merge(op, op.constant(base[adapter.weight]), values)
            weight.replace_all_uses_with(merged)
            for name, shape in adapter.shapes.items():
                ports[name] = Parameter(name=name, tensor=name, dtype="float32", shape=shape)
    inputs = tuple(ports[value.name or ""] for value in graph.inputs)
    return Model(refresh.ir, signature=msgspec.structs.replace(signature, inputs=inputs), initial=initial)


def _matrix_form(weight: LayerWeight) -> tuple[tuple[int, int], bool] | None:
    """The weight as a matrix [rows, columns], and whether its rows are the outputs, by the first layer that uses it.

    Conv has [outputs, inputs, ...], ConvTranspose [inputs, outputs, ...]; Gemm by transB; MatMul [inputs, outputs]; a
    Transpose or Reshape in front of the layer moves these axes. None where no layer uses it so.
    """
    shape = weight.content.shape
    for reader in weight.readers:
        read = reader.node.inputs[1]
        if reader.slot != 1 or reader.node.op_type not in _LAYERS or read is None:
            continue
        if reader.node.op_type in ("Gemm", "MatMul") and len(dims(read)) != 2:
            continue  # a stack of matrices, each with inputs and outputs of its own
        if reader.outputs == 0:
            return (shape[0], math.prod(shape[1:])), True
        if reader.outputs == len(shape) - 1:
            return (math.prod(shape[:-1]), shape[-1]), False
        if reader.axis == 0:
            return (shape[0], math.prod(shape[1:])), False
    return None


def _insert(model: Model, adapter: Adapter, seed: int) -> None:
    graph = model.ir.graph
    weight = graph.initializers[adapter.weight]
    # Taken before the merge is emitted, which reads the weight itself and must go on doing so.
    uses = list(weight.uses())
    op = Builder(graph, scope=f"{adapter.weight}.lora")
    values = {}
    for name, content in adapter.initial(seed).items():
        if name in graph.initializers or any(value.name == name for value in graph.inputs):
            raise ConversionError(f"adapters: the model already has a tensor called {name!r}; rename it")
        op.free_name(name)
        tensor = ir.tensor(content, name=name)
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(content.shape))
        value.const_value = tensor
        graph.register_initializer(value)
        values[name] = value
    with op.before(graph[0]):
        merged = adapter.merge(op, weight, values)
    for use in uses:
        use.node.replace_input_with(use.idx, merged)


def merge_adapters(model: Model) -> None:
    """Add the changes that a model's adapters make to their weights, and remove the adapters. Changes the model."""
    graph = model.ir.graph
    names = [name for name in parameter_names(model.ir) if f"{name}.lora_a" in graph.initializers]
    # An adapted weight is read by its merge alone (`_insert`).
    merged = {name: next(iter(graph.initializers[name].uses())).node.outputs[0] for name in names}
    contents = evaluate_constants(model.ir, [str(value.name) for value in merged.values()])
    for name, value in merged.items():
        weight = graph.initializers[name]
        value.replace_all_uses_with(weight)
        weight.const_value = ir.tensor(contents[str(value.name)], name=name)
    if names:
        remove_dead_code(model.ir)
        record_parameters(model.ir, [name for name in parameter_names(model.ir) if name in graph.initializers])
