"""Static int8: weights and activations are rounded with scales that calibration fixes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import onnx_ir as ir

from archipel.compression.arguments import check_choices, check_percent, check_whole
from archipel.compression.compressed import CompressedModel
from archipel.compression.deploy import constants, evaluate_constants
from archipel.compression.examples import Examples
from archipel.compression.part import Need
from archipel.compression.quantize.equalize import equalize_channels
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

        small, report = compress(model, [StaticInt8(calibration="mse")], calibration=images)

    Arguments:
        examples, batch_size: how many calibration examples give the ranges of activations, and how many run at a time.
        calibration: "minmax" takes all values, "percentile" leaves out 100 - `percentile` percent at each end, "mse"
            takes the range with the least squared error of rounding.
        per_channel: one scale for each output channel of a weight, else one for the weight.
        weights: "max" ends the range of a weight at its largest magnitude, "mse" as above.
        activations: "uint8", or "int8", symmetric, as some accelerators need. "auto" is "uint8": the kernels of x86-64
            and Arm are no slower with it, and Relu is free.
        reduce_range: weights of 7 bits, for other runtimes on x86-64 processors without VNNI, whose integer kernels add
            two products in 16 bits. On such a processor archipel's runtime computes these layers in float.
        equalize: makes the channels of neighbouring layers equally large (Nagel et al. 2019, section 4.1).
        bias_correction: takes away the shift of each channel's mean that rounding causes (section 4.2).
        rounding: "adaround" chooses the integer above or below each weight by the layer's output (Nagel et al. 2020).
        rounding_steps: how many steps train the choice for each layer.
        max_drop: how much quality may be lost, in points of accuracy on the validation data (without accuracy: percent
            of the loss). The layers that lose most stay in float, as few as possible. None: any loss.
        exclude: globs of names of weights whose layers stay in float.
        narrow_convolutions: "float" leaves convolutions of pictures that read fewer than 8 channels (first layers) in
            float: ONNX Runtime takes up to twice as long for them on integers. "int8" is for integer accelerators.

    Raises CompressionError for a field out of range; from `apply` where nothing can be quantized within `max_drop`.

    Example:
        small, report = archipel.compress(model, [StaticInt8()], data=data)
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
        check_whole(self, "examples", "batch_size", "rounding_steps")
        check_choices(self, calibration=("minmax", "percentile", "mse"), weights=("max", "mse"),
                activations=("auto", "uint8", "int8"), rounding=("nearest", "adaround"),
                narrow_convolutions=("float", "int8"))  # fmt: skip
        check_percent(self, "percentile")
        if self.max_drop is not None and not self.max_drop >= 0:
            raise CompressionError(f"StaticInt8: max_drop must be 0 or more, is {self.max_drop!r}")

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
        original = model
        if self.equalize:
            model = equalize_channels(model, calibration, work)
        source = float_form(model)
        settings = self._with_all_excluded(source.graph)
        calibrated = settings._calibrate(source, calibration)
        unfitted = model
        if self.rounding == "adaround":
            rounded, _ = simulate(source, self.scheme, calibrated, settings.exclude)
            fitted = fit_layers(
                model, rounded, calibration, work, levels=self.scheme.levels, rounding_steps=self.rounding_steps
            )
            work.note(adaround=fitted.errors)
            # Only parameters change: they round to the chosen integers wherever the graph is rounded with these scales.
            model = model.with_parameters(fitted.parameters)
            source = float_form(model)
        form = _Form(settings, work, calibration, calibrated, unfitted, model, source)
        float_layers = [] if self.max_drop is None else settings._in_float(original, form, work)
        return form.round(float_layers)

    def _with_all_excluded(self, graph: ir.Graph) -> StaticInt8:
        """These settings, with the names of all layers that stay in float in `exclude`."""
        candidates = layers(graph, constants(graph), self.exclude)
        if not candidates:
            raise CompressionError("StaticInt8: the model has no Conv, ConvTranspose, Gemm or MatMul to quantize")
        narrow = [layer.name for layer in candidates if layer.narrow]
        # If all layers are narrow, leaving them in float would leave nothing to quantize.
        if self.narrow_convolutions == "int8" or len(narrow) == len(candidates):
            return self
        return replace(self, exclude=(*self.exclude, *narrow))

    def _in_float(self, original: CompressedModel, form: _Form, work: Work) -> list[str]:
        """The layers that stay in float to keep within `max_drop`, measured on what devices run."""
        start, budget = work.evaluate(original), self.max_drop or 0.0
        drops: dict[frozenset[str], float] = {}

        # Cached: the search below asks again for sets that it has tried.
        def measure_drop(float_layers: Collection[str]) -> float:
            key = frozenset(float_layers)
            if key not in drops:
                work.progress(len(drops), len(drops) + 1, f"with {len(key)} layers in float")
                drops[key] = _lost_quality(start, work.evaluate(form.round(list(key))))
            return drops[key]

        if measure_drop([]) <= budget:
            work.note(float_layers=[], drop=measure_drop([]))
            return []
        ranked = sensitivities(
            form.source, self.scheme, form.calibrated, form.examples, self.exclude,
            lambda done, total: work.progress(done, total, "sensitivity of layers"),
        )  # fmt: skip
        # The least signal-to-noise ratio first.
        order = sorted(ranked, key=lambda name: ranked[name])
        # With all layers in float nothing is rounded, so nothing is lost.
        chosen = choose_float_layers(order, lambda names: len(names) == len(order) or measure_drop(names) <= budget)
        if len(chosen) == len(order):
            raise CompressionError(
                f"StaticInt8: with max_drop={self.max_drop:g} no layer can be quantized; allow more, or choose "
                "rounding='adaround', calibration='mse' or QuantizationAware"
            )
        work.note(float_layers=chosen, signal_to_noise_db={name: round(ranked[name], 1) for name in order},
                  drop=measure_drop(chosen))  # fmt: skip
        return chosen

    def _calibrate(self, source: ir.Model, examples: Examples) -> Calibrated:
        """Ranges for every value that may be rounded, and with `weights="mse"` the shares of the weights' ranges."""
        placement = place(source.graph, constants(source.graph), self.exclude)
        observer = Observer(self.calibration, self.percentile, self.scheme.kind, self.batch_size)
        # If a layer stays in float, a value may lose the neighbour whose scale it shares, and needs its own.
        alone = list(placement.sharing) if self.max_drop is not None else []
        names = [str(value.name) for value in [*placement.rounded, *alone]]
        ranges = observer.ranges(Model(source), names, examples)
        return Calibrated(ranges, self._ratios(source, placement.layers) if self.weights == "mse" else {})

    def _ratios(self, source: ir.Model, layers: list[Layer]) -> dict[str, np.ndarray]:
        weighted = {layer.key: layer for layer in layers if layer.axis is not None}
        names = {key: str(layer.node.inputs[1].name) for key, layer in weighted.items() if layer.node.inputs[1]}
        contents = evaluate_constants(source, list(names.values()))
        ratios = {}
        for key, name in names.items():
            axis = weighted[key].axis if self.per_channel else None
            shares = best_shares(as_rows(contents[name], axis), self.scheme.levels)
            ratios[key] = shares if self.per_channel else shares.reshape(())
        return ratios


@dataclass(frozen=True)
class _Form:
    """All that writing the rounding needs: the model before (`unfitted`) and after AdaRound, and `source`, the
    `float_form` of the latter.
    """

    settings: StaticInt8
    work: Work
    examples: Examples
    calibrated: Calibrated
    unfitted: CompressedModel
    model: CompressedModel
    source: ir.Model

    def round(self, float_layers: list[str]) -> CompressedModel:
        """The simulated graph with `float_layers` in float, with their weights from before AdaRound."""
        exclude = [*self.settings.exclude, *float_layers]
        model, source, calibrated = self.model, self.source, self.calibrated
        weights = self.unfitted.parameters
        restored = {name: weights[name] for name in float_layers if name in weights}
        # AdaRound moved these weights, which pays only where they are rounded.
        if restored and model is not self.unfitted:
            model = model.with_parameters(restored)
            source = float_form(model)
        scheme = self.settings.scheme
        if self.settings.bias_correction:
            # The shift depends on which layers round, so corrections are fitted anew for each set.
            draft, _ = simulate(source, scheme, calibrated, exclude)
            fitted = fit_layers(model, draft, self.examples, self.work, reference=self.unfitted, correct=True)
            calibrated = replace(calibrated, corrections=fitted.corrections)
        simulated, _ = simulate(source, scheme, calibrated, exclude)
        return CompressedModel(simulated, training_form=Model(model.copy().ir))


def _lost_quality(before: Score, after: Score) -> float:
    """The points of accuracy that are lost; without accuracy, by how many percent the loss grows."""
    if before.accuracy is not None and after.accuracy is not None:
        return 100 * (before.accuracy - after.accuracy)
    return 100 * (after.loss - before.loss) / max(abs(before.loss), 1e-30)
