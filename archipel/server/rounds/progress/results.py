"""What rounds found out, by names that say of what: of a training, or of an evaluation of its version."""

from __future__ import annotations

from archipel.protocol.operator.results import Distribution, RoundResult


def means_by_name(kind: str, result: RoundResult | None) -> dict[str, float]:
    """The means of the result of a task of this kind; those of an evaluation as `evaluation accuracy`."""
    means = {} if result is None else result.metrics
    return {f"evaluation {name}": mean for name, mean in means.items()} if kind == "evaluation" else dict(means)


def spread_by_name(result: RoundResult | None) -> dict[str, Distribution]:
    """Its distributions over devices, which evaluations alone have, by such names."""
    found = {} if result is None else result.distributions
    return {f"evaluation {name}": each for name, each in found.items()}
