"""What a round of a training came to, in one line."""

from __future__ import annotations

from archipel.cli.input_output.distributions import worst_tenths
from archipel.cli.input_output.remote import metrics_line, result_line
from archipel.operator import RoundMetrics, RoundResult


def clipped_text(result: RoundResult | None) -> str:
    """How many devices had their update clipped, such as "1 of 8"."""
    return "-" if result is None or result.clipped is None else f"{result.clipped} of {result.devices}"


def result_text(each: RoundMetrics) -> str:
    """The metrics of a round in one line, of a training with those of the version's evaluation."""
    if each.weights_out is None:
        return result_line(each.result)
    clamped = {} if each.result is None else each.result.clamped
    return metrics_line({**each.metrics, **worst_tenths(each.distributions)}, clamped)
