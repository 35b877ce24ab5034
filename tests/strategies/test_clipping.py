"""The clip that is chosen with a model, and how the server adapts it. Expected numbers are computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from archipel.errors import ConversionError
from archipel.strategies.clipping import choose_clip, clip_port, next_clip
from archipel.strategies.device import LocalTraining, Upload, describe
from archipel.strategies.fedavg import STRATEGY


def local(size: int, value: float, max_clip: float = math.inf) -> LocalTraining:
    return LocalTraining({"w": np.full(size, value, np.float32)}, max_clip=max_clip)


def test_it_begins_with_the_norm_of_the_parameters() -> None:
    """10,000 elements of 0.05: the norm is 5, the largest clip 20, whose mean element is 0.2, so the range 3.2."""
    chosen = choose_clip(Upload("fedavg"), local(10_000, 0.05))
    assert (chosen.start, chosen.bound, chosen.range) == pytest.approx((5.0, 20.0, 3.2), rel=1e-5)
    # Few elements may have the whole norm each.
    assert choose_clip(Upload("fedavg"), local(4, 2.0)).range == pytest.approx(16.0)
    # Zeros have no norm.
    assert choose_clip(Upload("fedavg"), local(4, 0.0)).start == 1.0
    assert choose_clip(Upload("fednova"), local(4, 8.0), share=0.25).start == pytest.approx(4.0)


def test_it_keeps_to_the_policy_and_to_what_the_publisher_says() -> None:
    bounded = choose_clip(Upload("fedavg"), local(10_000, 0.05, max_clip=8.0))
    assert (bounded.start, bounded.bound) == pytest.approx((5.0, 8.0), rel=1e-5)
    tight = choose_clip(Upload("fedavg"), local(10_000, 0.05, max_clip=2.0))
    assert (tight.start, tight.bound) == (2.0, 2.0)
    fixed = Upload("fedavg", clip=0.5)
    assert choose_clip(fixed, local(4, 2.0)) is fixed
    assert choose_clip(Upload("fedavg", value_range=0.1), local(4, 2.0)).range == 0.1
    with pytest.raises(ConversionError, match="strategy 'fedavg': no option 'start'"):
        describe("fedavg", STRATEGY.device, {"start": 1.0})


def test_it_moves_towards_one_clipped_update_of_ten() -> None:
    port = clip_port(choose_clip(Upload("fedavg"), local(4, 1.0)), 2.0)
    assert (port.default, port.minimum, port.maximum) == pytest.approx((2.0, 0.002, 8.0))
    assert next_clip(1.0, 1, 10, port) == 1.0
    assert next_clip(1.0, 0, 10, port) == pytest.approx(0.9048374)
    assert next_clip(1.0, 10, 10, port) == pytest.approx(2.4596031)
    assert next_clip(7.0, 10, 10, port) == 8.0
    assert next_clip(0.0021, 0, 10, port) == pytest.approx(0.002)
