"""The recipes that a search chooses from: structure first, fine-tuning, one form of numbers, fine-tuning again.

A form is offered if its part is registered in `recipe.PARTS`; a new form of numbers is one line in FORMS.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from archipel.compression.fine_tune import FineTune
from archipel.compression.part import Part
from archipel.compression.quantize.aware import QuantizationAware
from archipel.compression.quantize.static import StaticInt8
from archipel.compression.recipe import PARTS, kind_of

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

Values = Mapping[str, Any]
FLOAT32 = "float32"

FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    # name in reports: (kind of part, its fields)
    "int8": ("static_int8", {}),
    "int8 percentile": ("static_int8", {"calibration": "percentile"}),
    "int8 mse": ("static_int8", {"calibration": "mse"}),
    "int8 equalized": ("static_int8", {"equalize": True, "bias_correction": True}),
    "int8 dynamic": ("dynamic_int8", {}),
    "weights int8": ("weight_only", {"bits": 8}),
    "weights int4": ("weight_only", {"bits": 4}),
    "float16": ("float16", {}),
    "int8 adaround": ("static_int8", {"rounding": "adaround"}),
}
STRUCTURE: dict[str, tuple[str, str]] = {
    # name of the parameter: (kind of part, its field), the field being the share of FLOPs to remove
    "prune": ("prune_channels", "flops"),
    "low_rank": ("low_rank", "flops"),
}
TRAINED_AFTER = frozenset({"static_int8", "dynamic_int8", "weight_only"})
"""Kinds that fine-tuning may follow: what they round is float in the graph."""
SHARES = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75)
EPOCHS = (0, 1, 2, 4)
EPOCHS_AFTER = (0, 1, 2)
RATES = (3e-4, 1e-3, 3e-3)


@dataclass(frozen=True)
class Space:
    """The parameters of recipes and the values of each: whole numbers, shares or names.

    `forms`: forms of numbers by name. `structure`: parts that remove FLOPs: kind, the field with the share to remove,
    other fields. Without `training` data no recipe fine-tunes.
    """

    forms: Mapping[str, Part]
    structure: Mapping[str, tuple[type[Any], str, Mapping[str, Any]]]
    training: bool

    @classmethod
    def of(cls, training: bool, calibrated: bool = True) -> Space:
        """All recipes that the registered parts and the data allow."""
        kinds = {kind_of(part): part for part in PARTS}

        def registered(kind: str, *fields: str) -> bool:
            return kind in kinds and {f.name for f in dataclasses.fields(kinds[kind])}.issuperset(fields)

        forms: dict[str, Part] = {
            name: cast(Part, kinds[kind](**fields))
            for name, (kind, fields) in FORMS.items()
            if registered(kind, *fields) and (calibrated or kind != "static_int8")
        }
        # Taylor importance needs labels, and data-aware energy needs examples.
        lacking = {**({} if training else {"criterion": "l1"}), **({} if calibrated else {"data_aware": False})}
        structure = {
            name: (kinds[kind], field, {other: value for other, value in lacking.items() if registered(kind, other)})
            for name, (kind, field) in STRUCTURE.items()
            if registered(kind, field)
        }
        return cls(forms, structure, training)

    @property
    def choices(self) -> dict[str, tuple[Any, ...]]:
        """Every parameter and its values."""
        choices: dict[str, tuple[Any, ...]] = dict.fromkeys(self.structure, SHARES)
        choices["form"] = (FLOAT32, *self.forms)
        if self.training:
            choices["epochs"] = EPOCHS if self.structure else (0,)
            choices["epochs_after"] = EPOCHS_AFTER
            choices["lr"] = RATES
        return choices

    @property
    def anchors(self) -> list[dict[str, Any]]:
        """Values to try first, in this order: each form of numbers by itself, which is cheap and shows the range."""
        plain = {name: values[0] for name, values in self.choices.items()}
        return [{**plain, "form": form} for form in self.forms]

    def distributions(self) -> dict[str, BaseDistribution]:
        """The parameters as Optuna's distributions."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution

        return {
            name: FloatDistribution(0.0, SHARES[-1], step=SHARES[1]) if name in self.structure
            else CategoricalDistribution(values)
            for name, values in self.choices.items()
        }  # fmt: skip

    def recipe(self, values: Values) -> list[Part]:
        """The parts that the values stand for. Values without effect (epochs where nothing changed) are left out."""
        parts: list[Part] = []
        for name, (kind, field, others) in self.structure.items():
            if values[name]:
                parts.append(cast(Part, kind(**{field: values[name]}, **others)))
        lr = values.get("lr", RATES[0])
        if parts and values.get("epochs", 0):
            parts.append(FineTune(epochs=values["epochs"], lr=lr))
        form = self.forms.get(values["form"])
        if form is not None:
            parts.append(form)
            if values.get("epochs_after", 0) and kind_of(type(form)) in TRAINED_AFTER:
                # A tenth of the rate: weights need to move by about one rounding step.
                options = FineTune(epochs=values["epochs_after"], lr=float(f"{lr / 10:.1g}"), batch_norm="frozen")
                parts.append(QuantizationAware(options) if isinstance(form, StaticInt8) else options)
        return parts

    def screened(self, values: Values) -> dict[str, Any]:
        """The values without fine-tuning: bytes, FLOPs and latency are the same, at a fraction of the time."""
        return {name: 0 if name in ("epochs", "epochs_after") else value for name, value in values.items()}
