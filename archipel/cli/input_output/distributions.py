"""A distribution over devices in a line."""

from __future__ import annotations

from collections.abc import Mapping

from archipel.protocol.operator.results import Distribution, Estimate


def describe_distribution(distribution: Distribution) -> str:
    """Its mean, worst tenth, and deciles 1, 5 and 9, each with its error where it has one, and of how many devices."""
    low, middle, high = (_number(distribution.deciles[place]) for place in (0, 4, 8))
    return (
        f"mean {_number(distribution.mean)}, worst 10% {_number(distribution.worst)}, deciles 1, 5, 9: "
        f"{low}, {middle}, {high} ({distribution.devices} devices)"
    )


def worst_tenths(distributions: Mapping[str, Distribution]) -> dict[str, float]:
    """The mean of the worst tenth of the devices, by a name that says so."""
    return {f"{name} worst 10%": each.worst.value for name, each in distributions.items()}


def _number(figure: Estimate) -> str:
    if figure.error is None:
        return f"{figure.value:.4g} or beyond"
    return f"{figure.value:.4g}" + (f" ±{figure.error:.2g}" if figure.error else "")
