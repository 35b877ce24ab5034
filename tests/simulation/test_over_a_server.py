"""A simulated round and a real one of the same devices end at the same model, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import archipel
from archipel.bundle import Bundle, PrivacyPolicy, generate_key
from archipel.simulation.draws import device_seed
from tests.support.real_rounds import run_rounds
from tests.support.simulation import clients, dense, normalized

ROUNDS, BITS, SEED = 3, 24, 5
POLICY = PrivacyPolicy(modes=("secure",), min_cohort=3, threshold=0.6, max_clip=10.0, max_bits=BITS, colluders=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fedavg", "scaffold", "fednova", "ditto", "ifca", "feddistill", "rotated"])
def test_secure_rounds_of_a_server_come_out_bit_for_bit(
    make: Callable[..., Bundle], tmp_path: Path, strategy: str
) -> None:
    key = generate_key()
    options: dict[str, Any] = {"clip": 5.0, "bits": BITS}
    module = normalized if strategy == "fedavg" else dense
    if strategy == "rotated":
        # The adapted clip and the round's seed both come with the plan.
        strategy, options = "fedavg", {"clip": None, "bits": 10, "compress": "rotation"}
    bundle = make(strategy, module, key=key, privacy=POLICY, strategy_options=options)
    found = run_rounds(tmp_path, bundle, key, ROUNDS, lambda number, client: device_seed(SEED, number, client))
    expected = archipel.simulate(bundle, clients(), rounds=ROUNDS, seed=SEED, client_axis="off")
    for name, value in expected.parameters.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    start = bundle.parameters()
    assert max(np.abs(value - start[name]).max() for name, value in expected.parameters.items()) > 0.1
    if module is normalized:  # a variance over three examples makes much of the last digits
        return
    close = archipel.simulate(bundle, clients(), rounds=ROUNDS, seed=SEED, client_axis="on")
    for name, value in close.parameters.items():
        np.testing.assert_allclose(found[name], value, atol=1e-5, err_msg=name)
