"""Strategies with more than deltas over a real server: what is broadcast, what the server keeps, what devices keep."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from archipel.bundle import Bundle, PrivacyPolicy, generate_key
from tests.support.real_rounds import run_rounds
from tests.support.simulation import clients, simulate

ROUNDS, BITS = 3, 24
POLICY = PrivacyPolicy(modes=("secure",), min_cohort=3, threshold=0.6, max_clip=10.0, max_bits=BITS, colluders=0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        "scaffold",
        "fednova",
        "ditto",
        "fedadam",
        "fedexp",
        "feddyn",
        "moon",
        "pfedme",
        "perfedavg",
        "ifca",
        "feddistill",
    ],
)
def test_secure_rounds_come_out_like_simulated_ones(make: Callable[..., Bundle], tmp_path: Path, strategy: str) -> None:
    key = generate_key()
    # A batch holds all examples, so that their order, which devices draw by themselves, does not matter.
    bundle = make(strategy, key=key, batch_size=32, privacy=POLICY, strategy_options={"clip": 5.0, "bits": BITS})
    found = run_rounds(tmp_path, bundle, key, ROUNDS)
    expected = simulate(bundle, clients(), ROUNDS).parameters
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, atol=1e-4, err_msg=name)
    assert max(np.abs(value - bundle.parameters()[name]).max() for name, value in expected.items()) > 0.02
