"""LowRank: turn layers whose weight is nearly a product of two thin matrices into two thin layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from archipel.compression.compressed import CompressedModel
from archipel.compression.fine_tune import FineTune
from archipel.compression.layer_weights import LayerWeight, choose_weights, layer_weights, refuse_quantized
from archipel.compression.low_rank.choice import Choice, Layer, Unit, by_budget, by_energy
from archipel.compression.low_rank.factors import Factors, replace
from archipel.compression.low_rank.moments import moments
from archipel.compression.low_rank.splits import layer_splits
from archipel.compression.part import Need
from archipel.compression.work import Work
from archipel.errors import CompressionError
from archipel.graph.flops import network_flops
from archipel.graph.parameters import record_parameters


@dataclass(frozen=True)
class LowRank:
    """Split layers in two by singular value decomposition, and train the result with `fine_tune`.

    Gemm, MatMul and 1 x 1 Conv become two of their kind; a k x k Conv becomes k x 1 and then 1 x k, or the other way
    round (Jaderberg et al. 2014, scheme 2), or k x k with few channels and then 1 x 1 (Zhang et al. 2016), whichever
    is cheapest. A layer is replaced only where that saves. The new parameters are `<weight>.left`, read first, and
    `<weight>.right`.

    Arguments (exactly one of the first three):
        energy: each layer gets the lowest rank that keeps this share of its squared singular values.
        flops: the share of the model's FLOPs to remove; ranks fall where a saved FLOP loses least energy.
        size: the same for the parameters' bytes.
        layers, exclude: a glob of names of weights to split, and globs of those to leave.
        data_aware: energy is that of the layers' outputs over the calibration data, not of the weights.
        fine_tune: training after the split; None: none.

    Raises CompressionError for a field out of range; from `apply` where the target cannot be reached, or for masks.

    Example:
        thinner, report = archipel.compress(model, [LowRank(energy=0.99)], data=data)
    """

    energy: float | None = None
    flops: float | None = None
    size: float | None = None
    layers: str = "*"
    exclude: tuple[str, ...] = ()
    data_aware: bool = True
    fine_tune: FineTune | None = None

    def __post_init__(self) -> None:
        given = {name: value for name in ("energy", "flops", "size") if (value := getattr(self, name)) is not None}
        if len(given) != 1:
            raise CompressionError(f"LowRank: give exactly one of energy, flops and size, got {given or 'none'}")
        for name, value in given.items():
            if not 0.0 < value < 1.0 and not (name == "energy" and value == 1.0):
                raise CompressionError(f"LowRank: {name} is a share above 0 and below 1, got {value!r}")

    @property
    def needs(self) -> tuple[Need, ...]:
        data: tuple[Need, ...] = () if self.fine_tune is None else ("data",)
        return (*data, "calibration") if self.data_aware else data

    def apply(self, model: CompressedModel, work: Work) -> CompressedModel:
        refuse_quantized(model, "LowRank")
        result = CompressedModel.of(model).copy()
        counted = network_flops(result)
        weights, skipped = self._candidates(result, counted)
        layers = self._layers(result, weights, counted, work)
        notes: dict[str, Any] = {}
        parameters = list(result.parameter_names)
        for done, (layer, choice) in enumerate(zip(layers, self._choose(result, layers, sum(counted.values()))), 1):
            weight = weights[layer.name]
            if choice is None:
                skipped[layer.name] = "no rank that is low enough to save anything"
                continue
            names = replace(result.ir, weight, layer.splits[choice.split], choice.rank, layer.factors[choice.split])
            # Both factors take the place of the weight in the order of parameters.
            place = parameters.index(layer.name)
            parameters[place : place + 1] = names
            notes[layer.name] = {
                "split": layer.splits[choice.split].kind,
                "rank": choice.rank,
                "of": len(layer.factors[choice.split].values),
                "energy": round(1.0 - choice.lost, 6),
                "flops": [layer.flops, round(choice.flops)],
            }
            work.progress(done, len(layers), "factoring layers")
        record_parameters(result.ir, parameters)
        if self.fine_tune is not None and notes:
            result = work.train(result, self.fine_tune)
        work.note(
            layers=notes,
            skipped=skipped,
            flops=[sum(counted.values()), sum(network_flops(result).values())],
            bytes=[sum(t.nbytes for t in m.parameters.values()) for m in (model, result)],
        )
        return result

    def _candidates(
        self, model: CompressedModel, counted: dict[str, int]
    ) -> tuple[dict[str, LayerWeight], dict[str, str]]:
        candidates, skipped = {}, {}
        for weight in choose_weights(layer_weights(model), "LowRank", self.layers, self.exclude):
            if weight.mask is not None:
                raise CompressionError(
                    f"LowRank: {weight.name!r} has a mask; put LowRank before PruneWeights and PruneNM in the recipe, "
                    "or exclude it"
                )
            reason = layer_splits(weight, _flops_of(weight, counted))[1]
            if reason:
                skipped[weight.name] = reason
            else:
                candidates[weight.name] = weight
        return candidates, skipped

    def _layers(
        self, model: CompressedModel, weights: dict[str, LayerWeight], counted: dict[str, int], work: Work
    ) -> list[Layer]:
        splits = {n: tuple(layer_splits(w, _flops_of(w, counted))[0]) for n, w in weights.items()}
        input_moments = None
        if self.data_aware:
            sources = {name: str(weight.readers[0].node.inputs[0].name) for name, weight in weights.items()}  # type: ignore[union-attr]
            input_moments = moments(model, sources, splits, work.need_calibration(self), work.seed)
        return [
            Layer(
                name,
                _flops_of(weight, counted),
                weight.kept.size,
                splits[name],
                tuple(
                    Factors.of(s.matrix, None if input_moments is None else input_moments[name][i])
                    for i, s in enumerate(splits[name])
                ),
            )
            for name, weight in weights.items()
        ]

    def _choose(self, model: CompressedModel, layers: list[Layer], total: int) -> list[Choice | None]:
        if self.energy is not None:
            return [by_energy(layer, self.energy) for layer in layers]
        unit: Unit = "flops" if self.flops is not None else "size"
        share = self.flops if self.flops is not None else self.size or 0.0
        if unit == "size":
            total = sum(content.size for content in model.parameters.values())
        # The budget of the layers that can be split: the others keep their cost.
        own = sum(layer.flops if unit == "flops" else layer.elements for layer in layers)
        return by_budget(layers, unit, own - share * total)


def _flops_of(weight: LayerWeight, counted: dict[str, int]) -> int:
    node = weight.readers[0].node
    return counted.get(node.name or str(node.outputs[0].name), 0)
