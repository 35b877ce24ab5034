"""Weights stored in 8 or 4 bits, computation in float: small files, the accuracy of rounded weights alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal

import onnx_ir as ir

from archipel.compression.arguments import check_choices, check_whole
from archipel.compression.compressed import CompressedModel
from archipel.compression.deploy import constants, evaluate_constants
from archipel.compression.part import Need
from archipel.compression.quantize.blocks import Grid, round_weight
from archipel.compression.quantize.layerwise import fit_layers
from archipel.compression.quantize.placement import source_name
from archipel.compression.quantize.simulation import float_form
from archipel.errors import CompressionError
from archipel.graph import Builder, Model
from archipel.graph.passes.constants import EXACT
from archipel.graph.shapes import dims, is_static, rank

if TYPE_CHECKING:
    from archipel.compression.work import Work

_RECURRENT = ("LSTM", "GRU", "RNN")


@dataclass(frozen=True)
class WeightOnly:
    """Weights of Conv, ConvTranspose, Gemm, MatMul, LSTM, GRU, RNN and embeddings (Gather) in `bits` 8 or 4.

    Runtimes multiply the integers out when they open the graph: it runs as fast as in float, in as much memory.

    Arguments:
        bits: 8 or 4.
        block_size: weights along the axis that a layer sums over that share one float32 scale (4 bits in blocks of 32
            are 5 bits a weight). A convolution's blocks run over its input channels and window as one axis. None, or a
            weight of at most one block: one scale for each output channel.
        weights: "max" ends the range of each block at its largest magnitude, "mse" where rounding has the least squared
            error.
        rounding: "adaround" chooses the integers of Conv, Gemm and MatMul on calibration data, as in `StaticInt8`.
        rounding_steps: how many steps train the choice for each layer.
        smallest: weights with fewer elements stay in float.
        exclude: globs of names of weights that stay in float.

    Raises CompressionError for a field out of range; from `apply` where no weight is large enough.

    Example:
        small, report = archipel.compress(model, [WeightOnly(bits=8, smallest=16)])
    """

    bits: Literal[8, 4] = 8
    block_size: int | None = 32
    weights: Literal["max", "mse"] = "max"
    rounding: Literal["nearest", "adaround"] = "nearest"
    rounding_steps: int = 500
    smallest: int = 256
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_choices(self, bits=(8, 4), weights=("max", "mse"), rounding=("nearest", "adaround"))
        check_whole(self, "smallest", "rounding_steps")
        if self.block_size is not None:
            check_whole(self, "block_size")

    @property
    def needs(self) -> tuple[Need, ...]:
        return ("calibration",) if self.rounding == "adaround" else ()

    def apply(self, model: CompressedModel, work: Work) -> CompressedModel:
        if model.training_form is not None:
            raise CompressionError(
                "WeightOnly: the model is quantized already; quantize once, as the last step of a recipe"
            )
        simulated = self._simulate(model, work)
        if self.rounding == "adaround":
            calibration = work.need_calibration(self)
            fitted = fit_layers(
                model, simulated, calibration, work, levels=self._levels, rounding_steps=self.rounding_steps
            )
            work.note(adaround=fitted.errors)
            model = model.with_parameters(fitted.parameters)
            # Anew, from the parameters that round to the chosen integers.
            simulated = self._simulate(model, work)
        return CompressedModel(simulated, training_form=Model(model.copy().ir))

    @property
    def _levels(self) -> int:
        return int(2 ** (self.bits - 1) - 1)

    def _simulate(self, model: CompressedModel, work: Work) -> ir.Model:
        simulated = float_form(model)
        weights = [weight for weight in _weights(simulated.graph) if self._takes(weight)]
        if not weights:
            raise CompressionError(f"WeightOnly: the model has no weight of {self.smallest} elements or more")
        contents = {}
        if self.weights == "mse":
            contents = evaluate_constants(simulated, [str(weight.value.name) for weight in weights])
        op = Builder(simulated.graph, scope=f"int{self.bits}")
        for number, weight in enumerate(weights, start=1):
            work.progress(number, len(weights), f"weight {weight.name}")
            grid = Grid.of(weight.sizes, weight.inputs, weight.outputs, self.block_size)
            name, shares = str(weight.value.name), None
            # A factor of the scale in the graph, so that `refresh` scales trained weights alike.
            if name in contents:
                shares = grid.shares(contents[name].reshape(grid.shape), self._levels)
            with op.before(weight.readers[0][0]):
                result = round_weight(op, weight.value, grid, self.bits, shares, name)
            # All readers share one rounding.
            for node, index in weight.readers:
                node.replace_input_with(index, result)
        work.note(weights=[weight.name for weight in weights])
        return simulated

    def _takes(self, weight: _Weight) -> bool:
        count = 1
        for size in weight.sizes:
            count *= size
        named = any(weight.name == glob or fnmatchcase(weight.name, glob) for glob in self.exclude)
        return count >= self.smallest and not named


@dataclass(frozen=True)
class _Weight:
    """A constant that layers multiply with or look up in; `inputs` is the axis of the sum, `outputs` the other one."""

    value: ir.Value
    name: str
    sizes: tuple[int, ...]
    inputs: int
    outputs: int
    readers: tuple[tuple[ir.Node, int], ...]


def _weights(graph: ir.Graph) -> Iterator[_Weight]:
    known = constants(graph)
    readers: dict[ir.Value, list[tuple[ir.Node, int, int, int]]] = {}
    for node in graph:
        for index, inputs, outputs in _slots(node):
            value = node.inputs[index]
            if value is not None and value in known and value.dtype == ir.DataType.FLOAT and is_static(dims(value)):
                readers.setdefault(value, []).append((node, index, inputs, outputs))
    for value, slots in readers.items():
        _, _, inputs, outputs = slots[0]
        ends = tuple((node, index) for node, index, _, _ in slots)
        maker = value.producer()
        if maker is not None and _flips(maker) and maker.inputs[0] is not None and len(list(value.uses())) == len(ends):
            # The weight is rounded in front of the Transpose: ONNX Runtime would move a Transpose through
            # QuantizeLinear, and leave the axis of the blocks as it is.
            value, inputs, outputs, ends = maker.inputs[0], 1 - inputs, 1 - outputs, ((maker, 0),)
        sizes = tuple(d for d in dims(value) if isinstance(d, int))
        yield _Weight(value, source_name(value), sizes, inputs, outputs, ends)


def _flips(node: ir.Node) -> bool:
    source = node.inputs[0] if node.inputs else None
    return node.op_type == "Transpose" and node.domain == "" and source is not None and rank(source) == 2


def _slots(node: ir.Node) -> Iterator[tuple[int, int, int]]:
    """For each input of the node that is a weight: its index, the axis of the sum, the axis of the outputs."""
    if node.domain != "" or len(node.inputs) < 2 or EXACT in node.metadata_props:
        return
    if node.op_type in ("Conv", "ConvTranspose"):
        yield (1, 1, 0)  # blocks lie in the rows of the first axis, for both
    elif node.op_type == "Gemm":
        yield (1, 1, 0) if node.attributes.get_int("transB", 0) else (1, 0, 1)
    elif node.op_type == "MatMul":
        for index, value in enumerate(node.inputs[:2]):
            size = 0 if value is None or value.shape is None else rank(value)
            if size >= 2:
                yield (index, size - 2, size - 1) if index else (index, size - 1, size - 2)
    elif node.op_type in _RECURRENT:
        yield (1, 2, 1)
        yield (2, 2, 1)
    elif node.op_type == "Gather" and node.attributes.get_int("axis", 0) == 0:
        value = node.inputs[0]
        if value is not None and value.shape is not None and rank(value) == 2:
            yield (0, 1, 0)
