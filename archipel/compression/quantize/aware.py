"""Quantization-aware training: trains a graph that rounds, and the step sizes of its activations with it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from archipel.compression.compressed import CompressedModel
from archipel.compression.fine_tune import FineTune
from archipel.compression.part import Need
from archipel.errors import CompressionError
from archipel.graph import Builder
from archipel.graph.parameters import parameter_names, record_parameters
from archipel.graph.shapes import constant_array

if TYPE_CHECKING:
    from archipel.compression.work import Work

LOGARITHM = ".logarithm"
_DEFAULT = FineTune(epochs=2, lr=2e-4)


@dataclass(frozen=True)
class QuantizationAware:
    """Train a model in which `StaticInt8` (or another scheme) rounds, as `fine_tune` says.

        compress(model, [StaticInt8(), QuantizationAware(FineTune(epochs=2, lr=2e-4))], data=(images, labels))

    Gradients go straight through the rounding (Bengio et al. 2013). BatchNormalization is folded, with the running
    statistics that it has. Scales of weights follow the weights.

    Arguments:
        fine_tune: how to train; `batch_norm` is always "frozen". Use the optimizer "adam" with `learn_steps`.
        learn_steps: trains the scale of each activation as well (Esser et al. 2020, LSQ), as scale exp(r): it stays
            positive, and the optimizer changes all scales in proportion. At the end the scales are constants again.

    Raises CompressionError from `apply` where the model does not round.

    Example:
        small, report = archipel.compress(model, [StaticInt8(), QuantizationAware(FineTune(epochs=1))], data=data)
    """

    fine_tune: FineTune = _DEFAULT
    learn_steps: bool = True

    @property
    def needs(self) -> tuple[Need, ...]:
        return ("data",)

    def apply(self, model: CompressedModel, work: Work) -> CompressedModel:
        if model.training_form is None:
            raise CompressionError("QuantizationAware: nothing in the model rounds; put StaticInt8 before it")
        options = replace(self.fine_tune, batch_norm="frozen")
        scales = _activation_scales(model.ir.graph) if self.learn_steps else {}
        largest = {name: _largest_scale(model.ir.graph, name) for name in scales}
        staged = _with_logarithms(model, scales, largest)
        names = {f"{name}{LOGARITHM}": name for name in scales}
        trained = work.train(
            staged, options, trainable=(*model.trainable_names, *names), what="quantization-aware training"
        )
        # The trained graph is left behind with its logarithms: only values go back into the model.
        values = trained.parameters
        moved = {name: values[name] for name in model.trainable_names}
        learned = {
            name: np.minimum(scales[name] * np.exp(values[logarithm]), largest[name]).astype(np.float32)
            for logarithm, name in names.items()
        }
        moved.update(learned)
        work.note(steps_moved_by={name: round(float(scale / scales[name]), 3) for name, scale in learned.items()})
        return model.with_parameters(moved)


def _activation_scales(graph: ir.Graph) -> dict[str, np.ndarray]:
    """The scales that are constants, by name. The graph computes those of weights from the weights."""
    scales = {}
    for node in graph:
        if node.op_type == "QuantizeLinear" and node.domain == "":
            scale = node.inputs[1]
            content = constant_array(scale)
            if scale is not None and scale.is_initializer() and content is not None:
                scales[str(scale.name)] = content
    return scales


def _largest_scale(graph: ir.Graph, name: str) -> np.float32:
    """The largest scale at which the whole range of the integers lies within the Clips in front; infinite without one.

    Beyond a Clip steps would be wasted, and a runtime could not drop the Clip.
    """
    largest = np.float32(np.inf)
    for use in graph.initializers[name].uses():
        clip = use.node.inputs[0].producer() if use.node.op_type == "QuantizeLinear" and use.node.inputs[0] else None
        zero = constant_array(use.node.inputs[2]) if len(use.node.inputs) > 2 else None
        if clip is None or clip.op_type != "Clip" or zero is None:
            continue
        # Integers reach from (min - zero) to (max - zero) steps: each end must stay within its bound of the Clip.
        ends = np.iinfo(zero.dtype)
        for place, steps in ((1, ends.min - int(zero)), (2, ends.max - int(zero))):
            bound = constant_array(clip.inputs[place]) if len(clip.inputs) > place else None
            if bound is None or not steps or not bound / steps > 0:
                continue
            scale = np.float32(bound / steps)
            # The product in float32, as runtimes compute it, may be rounded to beyond the bound.
            while abs(scale * np.float32(steps)) > abs(bound):
                scale = np.nextafter(scale, np.float32(0))
            largest = min(largest, scale)
    return largest


def _with_logarithms(
    model: CompressedModel, scales: dict[str, np.ndarray], largest: dict[str, np.float32]
) -> CompressedModel:
    """A copy that multiplies these scales with exp(`<scale>.logarithm`), parameters that are 0, up to `largest`."""
    result = model.copy()
    graph = result.ir.graph
    names = list(parameter_names(result.ir))
    op = Builder(graph, scope="steps")
    for name, content in scales.items():
        scale = graph.initializers[name]
        # Listed before the product is made, which must go on reading the scale itself.
        uses = list(scale.uses())
        logarithm = op.initializer(f"{name}{LOGARITHM}", np.zeros(content.shape, np.float32))
        with op.before(graph[0]):
            moved = op.Mul(scale, op.Exp(logarithm))
            if np.isfinite(largest[name]):
                moved = op.Min(moved, op.constant(np.full(content.shape, largest[name], np.float32)))
        for use in uses:
            use.node.replace_input_with(use.idx, moved)
        names.append(str(logarithm.name))
    record_parameters(result.ir, names)
    return result
