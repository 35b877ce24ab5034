"""Static int8: weights and activations rounded with scales that calibration fixes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import onnx_ir as ir

from archipel.compression.compressed import CompressedModel
from archipel.compression.deploy import constants, evaluate_constants
from archipel.compression.examples import Examples
from archipel.compression.part import Need
from archipel.compression.quantize.arguments import choices, percent, whole
from archipel.compression.quantize.equalize import equalized
from archipel.compression.quantize.fallback import choose_float_layers, sensitivities
from archipel.compression.quantize.layerwise import fit_layers
from archipel.compression.quantize.placement import Layer, layers, place
from archipel.compression.quantize.ranges import Method, Observer
from archipel.compression.quantize.simulation import Calibrated, Scheme, float_form, simulate
from archipel.compression.quantize.weight_search import as_rows, best_shares
from archipel.compression.score import Score
from archipel.errors import CompressionError
from archipel.graph import Model

if TYPE_CHECKING:
    from archipel.compression.work import Work

FULL, REDUCED = 127, 63


@dataclass(frozen=True)
class StaticInt8:
    """int8 weights and 8-bit activations, in QDQ form: what integer kernels of runtimes and NPUs are made for.

    Ranges of activations come from the first `examples` of the calibration data, in batches of `batch_size`:
    `calibration="minmax"` takes all that was seen, "percentile" leaves out 100 - `percentile` percent at each end,
    "mse" has the least squared error of rounding. `weights="mse"` shortens the range of a weight likewise.
    `activations="uint8"` ("auto" is the same: the kernels of x86-64 and Arm are no slower with it, and Relu is free) or
    "int8", symmetric, as some accelerators need. `reduce_range` keeps weights to 7 bits, for x86-64 processors without
    VNNI, whose sums of two products have 16 bits.

    To lose less: `equalize` makes the channels of neighbouring layers equally large (Nagel et al. 2019, section 4.1),
    `bias_correction` takes away the shift of each channel's mean (section 4.2), `rounding="adaround"` chooses for each
    weight the integer above or below by what comes out of the layer (Nagel et al. 2020), in `rounding_steps` steps of
    training. With `max_drop`, in points of accuracy on the validation data (without accuracy: percent of the loss),
    the layers that lose most stay in float, as few as keep within it.

    Layers whose weight's name matches a glob in `exclude` stay in float, and so do convolutions of pictures that read
    fewer than 8 channels, as first layers do: on integers ONNX Runtime takes up to twice as long there as in float. An
    accelerator that has integers only needs `narrow_convolutions="int8"`.
    """

    examples: int = 512
    batch_size: int = 64
    calibration: Method = "minmax"
    percentile: float = 99.99
    per_channel: bool = True
    weights: Literal["max", "mse"] = "max"
    activations: Literal["auto", "uint8", "int8"] = "auto"
    reduce_range: bool = False
    equalize: bool = False
    bias_correction: bool = False
    rounding: Literal["nearest", "adaround"] = "nearest"
    rounding_steps: int = 500
    max_drop: float | None = None
    exclude: tuple[str, ...] = ()
    narrow_convolutions: Literal["float", "int8"] = "float"

    def __post_init__(self) -> None:
        whole(self, "examples", "batch_size", "rounding_steps")
        choices(self, calibration=("minmax", "percentile", "mse"), weights=("max", "mse"),
                activations=("auto", "uint8", "int8"), rounding=("nearest", "adaround"),
                narrow_convolutions=("float", "int8"))  # fmt: skip
        percent(self, "percentile")
        if self.max_drop is not None and not self.max_drop >= 0:
            raise CompressionError(f"StaticInt8: max_drop must be from 0, is {self.max_drop!r}")

    @property
    def scheme(self) -> Scheme:
        kind: Literal["uint8", "int8"] = "int8" if self.activations == "int8" else "uint8"
        return Scheme(kind, self.per_channel, REDUCED if self.reduce_range else FULL)

    @property
    def needs(self) -> tuple[Need, ...]:
        return ("calibration",) if self.max_drop is None else ("calibration", "validation")

    def apply(self, model: CompressedModel, work: Work) -> CompressedModel:
        if model.training_form is not None:
            raise CompressionError(
                "StaticInt8: the model is quantized already; quantize once, as the last step of a recipe"
            )
        if self.max_drop is not None:
            work.need_validation(self)
        calibration = work.need_calibration(self).take(slice(0, self.examples))
        given = model
        if self.equalize:
            model = equalized(model, calibration, work)
        source = float_form(model)
        recipe = self._with_all_excluded(source.graph)
        found = recipe._calibrate(source, calibration)
        before = model
        if self.rounding == "adaround":
            rounded, _ = simulate(source, self.scheme, found, recipe.exclude)
            fitted = fit_layers(
                model, rounded, calibration, work, levels=self.scheme.levels, rounding_steps=self.rounding_steps
            )
            work.note(adaround=fitted.errors)
            model = model.with_parameters(fitted.parameters)
            source = float_form(model)
        form = _Form(recipe, work, calibration, found, before, model, source)
        left = [] if self.max_drop is None else recipe._in_float(given, form, work)
        return form.rounded(left)

    def _with_all_excluded(self, graph: ir.Graph) -> StaticInt8:
        """This recipe, with all that stays in float named in `exclude`."""
        found = layers(graph, constants(graph), self.exclude)
        if not found:
            raise CompressionError("StaticInt8: the model has no Conv, ConvTranspose, Gemm or MatMul to quantize")
        narrow = [layer.name for layer in found if layer.narrow]
        # Whoever quantizes a network of one such layer means it.
        if self.narrow_convolutions == "int8" or len(narrow) == len(found):
            return self
        return replace(self, exclude=(*self.exclude, *narrow))

    def _in_float(self, given: CompressedModel, form: _Form, work: Work) -> list[str]:
        """The layers that stay in float so that what devices run is within `max_drop`."""
        start, budget = work.evaluate(given), self.max_drop or 0.0
        drops: dict[frozenset[str], float] = {}

        def drop(left: Collection[str]) -> float:
            key = frozenset(left)
            if key not in drops:
                work.progress(len(drops), len(drops) + 1, f"with {len(key)} layers in float")
                drops[key] = _drop(start, work.evaluate(form.rounded(list(key))))
            return drops[key]

        if drop([]) <= budget:
            work.note(float_layers=[], drop=drop([]))
            return []
        ranked = sensitivities(
            form.source, self.scheme, form.found, form.examples, self.exclude,
            lambda done, total: work.progress(done, total, "sensitivity of layers"),
        )  # fmt: skip
        order = sorted(ranked, key=lambda name: ranked[name])
        # With nothing left to round it is the float network.
        chosen = choose_float_layers(order, lambda left: len(left) == len(order) or drop(left) <= budget)
        if len(chosen) == len(order):
            raise CompressionError(
                f"StaticInt8: with max_drop={self.max_drop:g} no layer can be quantized; allow more, or choose "
                "rounding='adaround', calibration='mse' or QuantizationAware"
            )
        work.note(float_layers=chosen, signal_to_noise_db={name: round(ranked[name], 1) for name in order},
                  drop=drop(chosen))  # fmt: skip
        return chosen

    def _calibrate(self, source: ir.Model, examples: Examples) -> Calibrated:
        """Ranges for every value that may be rounded, and the shares of the weights' ranges that are used."""
        placement = place(source.graph, constants(source.graph), self.exclude)
        observer = Observer(self.calibration, self.percentile, self.scheme.kind, self.batch_size)
        # Where layers may stay in float, a value may lose the neighbour whose scale it has.
        alone = list(placement.sharing) if self.max_drop is not None else []
        names = [str(value.name) for value in [*placement.rounded, *alone]]
        ranges = observer.ranges(Model(source), names, examples)
        return Calibrated(ranges, self._ratios(source, placement.layers) if self.weights == "mse" else {})

    def _ratios(self, source: ir.Model, layers: list[Layer]) -> dict[str, np.ndarray]:
        weighted = {layer.key: layer for layer in layers if layer.axis is not None}
        names = {key: str(layer.node.inputs[1].name) for key, layer in weighted.items() if layer.node.inputs[1]}
        contents = evaluate_constants(source, list(names.values()))
        found = {}
        for key, name in names.items():
            axis = weighted[key].axis if self.per_channel else None
            shares = best_shares(as_rows(contents[name], axis), self.scheme.levels)
            found[key] = shares if self.per_channel else shares.reshape(())
        return found


@dataclass(frozen=True)
class _Form:
    """All that is needed to write the rounding: `model` is fitted, `before` it was, `source` is its `float_form`."""

    recipe: StaticInt8
    work: Work
    examples: Examples
    found: Calibrated
    before: CompressedModel
    model: CompressedModel
    source: ir.Model

    def rounded(self, left: list[str]) -> CompressedModel:
        """The simulated graph in which the layers `left` are in float, with the weights they had before."""
        exclude, model, source, found = [*self.recipe.exclude, *left], self.model, self.source, self.found
        kept = self.before.parameters
        restored = {name: kept[name] for name in left if name in kept}
        if restored and model is not self.before:
            model = model.with_parameters(restored)
            source = float_form(model)
        scheme = self.recipe.scheme
        if self.recipe.bias_correction:
            draft, _ = simulate(source, scheme, found, exclude)
            fitted = fit_layers(model, draft, self.examples, self.work, reference=self.before, correct=True)
            found = replace(found, corrections=fitted.corrections)
        simulated, _ = simulate(source, scheme, found, exclude)
        return CompressedModel(simulated, training_form=Model(model.copy().ir))


def _drop(before: Score, after: Score) -> float:
    """Points of accuracy that are lost; where there is no accuracy, percent of the loss that are added."""
    if before.accuracy is not None and after.accuracy is not None:
        return 100 * (before.accuracy - after.accuracy)
    return 100 * (after.loss - before.loss) / max(abs(before.loss), 1e-30)
