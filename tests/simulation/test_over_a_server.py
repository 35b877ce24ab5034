"""A simulated round and a real one of the same devices end at the same model, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import archipel
from archipel.bundle import Bundle, PrivacyPolicy, generate_key
from archipel.simulation import Aggregation, combining
from archipel.simulation.draws import device_seed
from tests.support.real_rounds import run_rounds
from tests.support.simulation import clients, dense, normalized

ROUNDS, BITS, SEED = 3, 24, 5
POLICY_FIELDS: dict[str, Any] = {
    "modes": ("secure",), "min_cohort": 3, "threshold": 0.6, "max_clip": 10.0, "max_bits": BITS, "colluders": 0.0,
}  # fmt: skip
POLICY = PrivacyPolicy(**POLICY_FIELDS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", ["fedavg", "scaffold", "fednova", "ditto", "ifca", "feddistill", "rotated", "low_rank"]
)
def test_secure_rounds_of_a_server_come_out_bit_for_bit(
    make: Callable[..., Bundle], tmp_path: Path, strategy: str
) -> None:
    key = generate_key()
    options: dict[str, Any] = {"clip": 5.0, "bits": BITS}
    module = normalized if strategy == "fedavg" else dense
    if strategy == "rotated":
        # The adapted clip and the round's seed both come with the plan.
        strategy, options = "fedavg", {"clip": None, "bits": 10, "compress": "rotation"}
    elif strategy == "low_rank":
        # The bases are a state of the server's, and devices get them with the weights.
        strategy, options = "fedavg", {"clip": 5.0, "bits": 20, "compress": "low_rank", "compress_rank": 1}
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


def own_seed(number: int, client: int) -> int:
    return device_seed(SEED, number, client)


@pytest.mark.slow
def test_plain_rounds_with_a_robust_rule_come_out_bit_for_bit(make: Callable[..., Bundle], tmp_path: Path) -> None:
    key, policy = generate_key(), PrivacyPolicy(**{**POLICY_FIELDS, "modes": ("plain",)})
    bundle = make("fedavg", dense, key=key, privacy=policy, strategy_options={"clip": 5.0, "bits": BITS})
    rule = Aggregation(rule="trimmed-mean", tolerated=1, mixing="nnm")
    found = run_rounds(
        tmp_path, bundle, key, ROUNDS, own_seed, privacy="plain", threshold=None, aggregation=rule
    )  # fmt: skip
    simulated = archipel.simulate(
        bundle, clients(), rounds=ROUNDS, seed=SEED, client_axis="off", privacy="plain", aggregation=rule
    )
    mean = archipel.simulate(bundle, clients(), rounds=ROUNDS, seed=SEED, client_axis="off", privacy="plain")
    check_same(found, simulated.parameters, mean.parameters)


@pytest.mark.slow
def test_rounds_with_a_trusted_device_come_out_as_with_examples_of_the_servers_own(
    make: Callable[..., Bundle], tmp_path: Path
) -> None:
    """The device that the task names is the simulation's client after the last."""
    key, policy = generate_key(), PrivacyPolicy(**{**POLICY_FIELDS, "modes": ("plain",)})
    bundle = make("fedavg", dense, key=key, privacy=policy, strategy_options={"clip": 5.0, "bits": BITS})
    x, y = clients()[3]
    root, options = (x[::2] + 0.1, y[::2]), {"rounds": ROUNDS, "seed": SEED, "client_axis": "off", "privacy": "plain"}
    devices = [*clients(), root]
    found = run_rounds(tmp_path, bundle, key, ROUNDS, own_seed, devices, root=4, privacy="plain", threshold=None)
    simulated = archipel.simulate(bundle, clients(), aggregation="fltrust", root=root, **options)
    for name, value in simulated.parameters.items():
        # The updates are added in another order, that of the devices' ids.
        np.testing.assert_allclose(found[name], value, atol=1e-6, err_msg=name)
    mean = archipel.simulate(bundle, clients(), **options)
    assert max(np.abs(found[name] - mean.parameters[name]).max() for name in found) > 1e-3


@pytest.mark.slow
def test_rounds_in_secure_groups_come_out_bit_for_bit(
    make: Callable[..., Bundle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server draws the groups so that nobody can predict them, so the simulation is told who was in which."""
    key, policy = generate_key(), PrivacyPolicy(**{**POLICY_FIELDS, "min_cohort": 2})
    bundle = make("fedavg", dense, key=key, privacy=policy, strategy_options={"clip": 5.0, "bits": BITS})
    devices = [*clients(), *((x + 1, y) for x, y in clients()[:2])]
    rule, groups = Aggregation(rule="median", tolerated=1), list[dict[int, int]]()
    found = run_rounds(
        tmp_path, bundle, key, ROUNDS, own_seed, devices, groups, min_cohort=2, cohort=6, threshold=2, secure_groups=3,
        aggregation=rule,
    )  # fmt: skip
    assert [sorted(each.values()) for each in groups] == [[0, 0, 1, 1, 2, 2]] * ROUNDS

    def as_drawn(chosen: NDArray[np.int64], count: int, order: NDArray[np.int64]) -> dict[int, int]:
        return {int(client): groups[0][int(client)] for client in chosen}

    monkeypatch.setattr(combining, "divide", as_drawn)
    options = {"rounds": ROUNDS, "seed": SEED, "client_axis": "off"}
    simulated = archipel.simulate(
        bundle, devices, secure_groups=3, aggregation=rule, on_round=lambda row: bool(groups.pop(0)) or True, **options
    )
    mean = archipel.simulate(bundle, devices, **options)
    check_same(found, simulated.parameters, mean.parameters)


def check_same(found: dict[str, np.ndarray], simulated: dict[str, np.ndarray], others: dict[str, np.ndarray]) -> None:
    """The same numbers, and not those of a mean."""
    for name, value in simulated.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    assert max(np.abs(found[name] - others[name]).max() for name in found) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("compress", ["rotation", "random_k", "top_k"])
def test_packed_updates_of_plain_rounds_come_out_as_simulated(
    make: Callable[..., Bundle], tmp_path: Path, compress: str
) -> None:
    """What a device keeps back in a round is on its disk in the next one."""
    key = generate_key()
    policy = PrivacyPolicy(modes=("plain",), min_cohort=3, threshold=0.6, max_clip=10.0, max_bits=BITS, colluders=0.0)
    options = {"clip": 5.0, "bits": 6, "compress": compress, "share": 0.3}
    bundle = make("fedavg", dense, key=key, privacy=policy, strategy_options=options)
    found = run_rounds(tmp_path, bundle, key, ROUNDS, own_seed, privacy="plain", threshold=None)
    expected = archipel.simulate(bundle, clients(), rounds=ROUNDS, seed=SEED, privacy="plain", client_axis="off")
    for name, value in expected.parameters.items():
        # Sums of floating point, in the order in which updates come.
        np.testing.assert_allclose(found[name], value, atol=1e-6, err_msg=name)
    start = bundle.parameters()
    assert max(np.abs(value - start[name]).max() for name, value in expected.parameters.items()) > 0.05
