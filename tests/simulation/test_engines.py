"""Every way of running local rounds gives the same model, and it is that of independent rounds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archipel import strategies
from archipel.bundle import Bundle, read_weights
from archipel.errors import SimulationError
from archipel.lite_runtime.values import Values
from archipel.simulation import ListedClients, SplitClients, simulate
from archipel.simulation.draws import device_seed
from tests.support import simulation as reference

Make = Callable[..., Bundle]
BITS, ROUNDS = 24, 3
NEEDED: dict[str, dict[str, Any]] = {
    "fedrep": {"personal": "head.*"},
    "fedper": {"personal": "head.*"},
    "scaffold": {"control_clip": 1000.0},
}
# dpsgd draws noise; fedasync has no rounds of several devices (tests/strategies/test_fedasync.py).
QUIET = sorted(set(strategies.STRATEGIES) - {"dpsgd", "fedasync"})


def bundle_of(make: Make, strategy: str, **changes: Any) -> Bundle:
    options = {"clip": 50.0, "bits": BITS, **NEEDED.get(strategy, {})}
    # Running statistics are averaged, or stay on the device.
    module = reference.normalized if strategy in ("fedbn", "fedprox") else reference.dense
    return make(strategy, module, strategy_options=options, **changes)


def fields() -> list[dict[str, np.ndarray]]:
    return [{"input": x, "label": y} for x, y in reference.clients()]


@pytest.fixture(autouse=True)
def same_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference numbers rounds from 0, and has seeds of its own."""
    monkeypatch.setattr(
        reference, "round_seed", lambda number, client: device_seed(0, number + 1, client), raising=True
    )


@pytest.mark.parametrize("strategy", QUIET)
@pytest.mark.sampled(every=6)
def test_rounds_come_out_like_independent_ones(make: Make, strategy: str) -> None:
    bundle = bundle_of(make, strategy)
    expected = reference.simulate(bundle, reference.clients(), ROUNDS).parameters
    for axis in ("off", "on"):
        found = simulate(bundle, fields(), rounds=ROUNDS, client_axis=axis)
        assert [row.failed for row in found.history] == [""] * ROUNDS
        assert [row.devices for row in found.history] == [4] * ROUNDS
        for name, value in expected.items():
            np.testing.assert_allclose(found.parameters[name], value, atol=2e-4, err_msg=f"{axis}: {name}")
        moved = max(np.abs(value - bundle.parameters()[name]).max() for name, value in expected.items())
        assert moved > 0.02


@pytest.mark.slow
@pytest.mark.parametrize("strategy", QUIET)
def test_every_strategy_runs_on_pytorch(make: Make, strategy: str) -> None:
    bundle = bundle_of(make, strategy)
    expected = simulate(bundle, fields(), rounds=ROUNDS, client_axis="off")
    found = simulate(bundle, fields(), rounds=ROUNDS, client_axis="on", engine="torch:cpu")
    assert [row.devices for row in found.history] == [row.devices for row in expected.history]
    for name, value in expected.parameters.items():
        np.testing.assert_allclose(found.parameters[name], value, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("privacy", ["secure", "plain"])
@pytest.mark.sampled(every=8)
def test_any_number_of_workers_gives_the_same_bits(make: Make, privacy: str, tmp_path: Path) -> None:
    """SCAFFOLD's devices keep control variates, which go from worker to worker by way of the disk."""
    bundle = bundle_of(make, "scaffold")
    arrays = {name: np.concatenate([each[name] for each in fields()]) for name in ("input", "label")}
    ends = np.cumsum(reference.SIZES)
    parts = [np.arange(end - size, end) for size, end in zip(reference.SIZES, ends)]
    given: dict[str, Any] = {"rounds": ROUNDS, "cohort": 3, "privacy": privacy, "client_axis": "off"}
    alone = simulate(bundle, SplitClients(arrays, parts), **given)
    several = simulate(bundle, SplitClients(arrays, parts), workers=2, **given)
    listed = simulate(bundle, ListedClients(fields()), folder=tmp_path, **given)
    for name, value in alone.parameters.items():
        np.testing.assert_array_equal(several.parameters[name], value)
        np.testing.assert_array_equal(listed.parameters[name], value)
    assert [row.metrics for row in several.history] == [row.metrics for row in alone.history]
    assert several.clients == alone.clients == listed.clients


@pytest.mark.sampled(every=4)
def test_what_the_server_has_after_each_round_is_kept(make: Make, tmp_path: Path) -> None:
    bundle = bundle_of(make, "fedavg")
    simulate(bundle, fields(), rounds=3, folder=tmp_path / "run", keep_rounds=True)
    for number in (1, 2, 3):
        alone = simulate(bundle, fields(), rounds=number).parameters
        kept = read_weights(tmp_path / f"run/versions/round-{number}.safetensors")
        assert kept.keys() == alone.keys()
        for name, value in alone.items():
            np.testing.assert_array_equal(kept[name], value)
    with pytest.raises(SimulationError, match="keep_rounds: needs a folder"):
        simulate(bundle, fields(), rounds=1, keep_rounds=True)


@pytest.mark.sampled(every=4)
def test_noise_is_drawn_for_each_device_by_itself(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """With sources of random bytes that the devices' seeds decide, in place of the system's, draws can be compared."""
    noisy = {"clip": 50.0, "bits": BITS, "example_clip": 1.0, "noise_multiplier": 1.0}
    bundle = make("dpsgd", strategy_options=noisy)

    def source(number: int, client: int) -> Callable[[int], bytes]:
        return np.random.default_rng(device_seed(0, number + 1, client)).bytes

    expected = reference.simulate(bundle, reference.clients(), ROUNDS, randomness=source).parameters
    made = Values.__init__

    def with_source(values: Values, *given: Any, seed: int = 0, **named: Any) -> None:
        made(values, *given, seed=seed, **{**named, "randomness": np.random.default_rng(seed).bytes})

    monkeypatch.setattr(Values, "__init__", with_source)
    for axis in ("off", "on"):
        found = simulate(bundle, fields(), rounds=ROUNDS, client_axis=axis)
        for name, value in expected.items():
            np.testing.assert_allclose(found.parameters[name], value, atol=1e-4, err_msg=f"{axis}: {name}")
    monkeypatch.undo()
    quiet = simulate(bundle, fields(), rounds=1, client_axis="on")
    again = simulate(bundle, fields(), rounds=1, client_axis="on")
    assert any((quiet.parameters[name] != again.parameters[name]).any() for name in expected)


@pytest.mark.sampled(every=3)
def test_a_client_that_diverges_drops_out(make: Make) -> None:
    bundle, data = bundle_of(make, "fedavg"), fields()
    data[1]["input"] = np.full_like(data[1]["input"], np.nan)
    for axis in ("off", "on"):
        found = simulate(bundle, data, rounds=2, client_axis=axis)
        assert [row.devices for row in found.history] == [3, 3]
        assert found.clients[1].counted == 0
        assert found.clients[1].drawn == 2
        assert all(np.isfinite(value).all() for value in found.parameters.values())


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("axis", ["off", "on"])
def test_examples_that_do_not_fit_name_the_client(make: Make, axis: str) -> None:
    bundle, data = bundle_of(make, "fedavg"), fields()
    data[2]["input"] = data[2]["input"].astype(np.float64)
    with pytest.raises(SimulationError, match=r"client 2, round 1: local data: 'input' must be float32"):
        simulate(bundle, data, rounds=1, client_axis=axis)  # type: ignore[arg-type]
