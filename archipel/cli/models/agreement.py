"""How far `predict` and the training form of a bundle agree: the bounds as options, and the measurements as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import click

from archipel.cli.input_output.option_group import option_group
from archipel.lite_runtime.agreement import MIN_AGREEMENT, MIN_SNR

SETS = ("calibration", "validation")
"""The sets of examples on which a conversion measures it."""


@dataclass(frozen=True)
class AgreementOptions:
    """The bounds below which a bundle is refused."""

    min_agreement: float
    min_snr: float

    def low(self, metrics: Mapping[str, float]) -> list[str]:
        """What the metrics of a lineage have below the bounds, as the conversion decides it: by classes if any."""
        found = []
        for name in SETS:
            share, snr = metrics.get(f"agreement_{name}"), metrics.get(f"snr_db_{name}")
            if share is not None and share < self.min_agreement:
                found.append(f"{name}: {share:.1%} equal classes, expected at least {self.min_agreement:.1%}")
            if share is None and snr is not None and snr < self.min_snr:
                found.append(f"{name}: signal to noise {snr:.1f} dB, expected at least {self.min_snr:g} dB")
        return found


agreement_options = option_group(
    "agreement",
    AgreementOptions,
    click.option("--min-agreement", type=click.FloatRange(0, 1), default=MIN_AGREEMENT, show_default=True,
                 help="Of a compressed classifier: the least share of examples to which the bundle gives the class "
                      "that the float parameters give."),
    click.option("--min-snr", type=float, default=MIN_SNR, show_default=True, metavar="DB",
                 help="Of other compressed models, and where all examples are in one class: the least signal-to-noise "
                      "ratio of the bundle's answers, in dB."),
)  # fmt: skip


def agreement_lines(metrics: Mapping[str, float]) -> list[str]:
    """What the metrics of a lineage say of it, one line for each set of examples."""
    lines = []
    for name in SETS:
        if f"snr_db_{name}" in metrics:
            share = metrics.get(f"agreement_{name}")
            classes = "" if share is None else f"{share:.1%} equal classes, "
            lines.append(
                f"predict and training form on the {name} examples: {classes}"
                f"signal to noise {metrics[f'snr_db_{name}']:.1f} dB"
            )
    return lines
