"""What `archipel inspect` says of the defaults that change a round's result."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from archipel.bundle import Bundle
from archipel.cli.models.inspect import bundle_facts
from archipel.cli.models.update_text import update_lines
from tests.support.fixtures.strategies import make  # noqa: F401
from tests.support.simulation import dense


@pytest.mark.sampled(every=4)
def test_of_a_clip_that_the_server_adapts(make: Callable[..., Bundle]) -> None:  # noqa: F811
    lines = update_lines(bundle_facts(make("fedavg", strategy_options={"clip": None, "weight_cap": 100})))
    norm = math.sqrt(sum(float(each.detach().square().sum()) for each in dense().parameters()))
    assert lines == [
        f"update: clipped to a norm of {norm:.4g} at first, which the server adapts to what devices report, up to "
        f"{4 * norm:.4g}",
        f"rounding: an element of an update is at most {4 * norm:.4g}, in 16 bits",
        "weighting: by examples; a device with 100 or more weighs 1 (weight_cap)",
        f"hyperparameter: update_clip {norm:.6g}, a task may set {norm / 1000:.4g} to {4 * norm:.4g}",
        "hyperparameter: lr 0.2, a task may set 0 to 100",
        "rounds report: update/clipped (up to 1), update/capped (up to 1), loss (up to 64), accuracy (up to 1)",
    ]


@pytest.mark.sampled(every=3)
def test_of_a_fixed_clip_with_noise(make: Callable[..., Bundle]) -> None:  # noqa: F811
    lines = update_lines(bundle_facts(make("dpsgd", strategy_options={"clip": 0.5, "weighting": "uniform"})))
    assert lines[:3] == [
        "update: clipped to a norm of 0.5 in every round",
        "rounding: an element of an update is at most 0.5, in 16 bits",
        "weighting: every device weighs 1",
    ]
    assert lines[-1] == "rounds report: no metrics"
