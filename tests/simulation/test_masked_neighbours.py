"""Rounds over neighbours that are really masked end where those without masks end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

import archipel
from archipel.bundle import Bundle
from archipel.converter.request import DEFAULT_PRIVACY
from archipel.errors import PolicyError, SimulationError
from archipel.protocol.secagg_plus.terms import agreement_of
from archipel.simulation import RoundRow, System
from archipel.simulation.secure import neighbours
from archipel.simulation.system.settings import Pacing

Make = Callable[..., Bundle]
POLICY = msgspec.structs.replace(DEFAULT_PRIVACY, server="semi-honest", colluders=0.1, dropouts=0.25, min_cohort=3)


def bundle_of(make: Make, **changes: Any) -> Bundle:
    options = {"clip": 50.0, "bits": 16}
    return make("fedavg", strategy_options=options, privacy=msgspec.structs.replace(POLICY, **changes))


def fields(count: int) -> list[dict[str, np.ndarray]]:
    draws = np.random.default_rng(7)
    return [
        {"input": draws.normal(size=(3, 6)).astype(np.float32), "label": draws.integers(0, 3, 3)} for _ in range(count)
    ]


@pytest.mark.parametrize(
    ("count", "server", "protocol"),
    [(30, "semi-honest", "neighbours"), (24, "malicious", "neighbours"), (16, "semi-honest", "neighbours-mlkem")],
)
@pytest.mark.sampled(every=4)
def test_rounds_over_neighbours_give_the_same_model(
    make: Make, count: int, server: Any, protocol: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = bundle_of(make, server=server, protocols=("complete", protocol))
    left: list[int] = []
    real = neighbours.unmask_sum

    def note(total: Any, **given: Any) -> Any:
        plain = real(total, **given)
        assert np.mean(total == plain) < 0.2
        left.append(len(given["sharers"]) - len(given["survivors"]))
        assert given["roster"].agreement is agreement_of(protocol)
        return plain

    monkeypatch.setattr(neighbours, "unmask_sum", note)
    given: dict[str, Any] = {"rounds": 2, "dropout": 0.1, "client_axis": "off", "seed": 4, "protocol": protocol}
    found = archipel.simulate(bundle, fields(count), **given, masks=True)
    expected = archipel.simulate(bundle, fields(count), **given)
    for name, value in expected.parameters.items():
        np.testing.assert_array_equal(found.parameters[name], value)
        assert (value != bundle.parameters()[name]).any()
    assert len(left) == 2
    assert max(left) > 0
    assert [row.devices for row in found.history] == [row.devices for row in expected.history]


@pytest.mark.sampled(every=4)
def test_secure_groups_over_neighbours_give_the_same_model(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group is a round of its own: its devices draw neighbours among themselves, and the rule goes over means."""
    sizes: list[int] = []
    real = neighbours.unmask_sum

    def note(total: Any, **given: Any) -> Any:
        sizes.append(len(given["roster"].members))
        return real(total, **given)

    monkeypatch.setattr(neighbours, "unmask_sum", note)
    given: dict[str, Any] = {
        "rounds": 1, "client_axis": "off", "seed": 4, "protocol": "neighbours", "secure_groups": 3,
        "aggregation": "median", "tolerated": 1,
    }  # fmt: skip
    found = archipel.simulate(bundle_of(make), fields(36), **given, masks=True)
    expected = archipel.simulate(bundle_of(make), fields(36), **given)
    assert sizes == [12, 12, 12]
    for name, value in expected.parameters.items():
        np.testing.assert_array_equal(found.parameters[name], value)
        assert (value != bundle_of(make).parameters()[name]).any()


@pytest.mark.slow
def test_many_devices_are_neighbours_where_nobody_says_so(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[int] = []
    real = neighbours.unmask_sum

    def note(total: Any, **given: Any) -> Any:
        rounds.append(given["roster"].sizes.neighbours)
        return real(total, **given)

    monkeypatch.setattr(neighbours, "unmask_sum", note)
    given: dict[str, Any] = {"rounds": 1, "dropout": 0.1, "client_axis": "off"}
    found = archipel.simulate(bundle_of(make), fields(300), **given, masks=True)
    expected = archipel.simulate(bundle_of(make), fields(300), **given)
    for name, value in expected.parameters.items():
        np.testing.assert_array_equal(found.parameters[name], value)
    assert len(rounds) == 1
    assert rounds[0] < 100


def test_too_few_devices_make_no_sum(make: Make) -> None:
    bundle = bundle_of(make)
    given: dict[str, Any] = {"rounds": 1, "client_axis": "off", "protocol": "neighbours", "masks": True}
    found = archipel.simulate(bundle, fields(24), **given, dropout=0.95)
    assert found.history[0].failed == "no device's update came"


@pytest.mark.parametrize(
    ("changes", "given", "error", "match"),
    [
        ({"protocols": ("complete",)}, {"protocol": "neighbours"}, PolicyError, r"allows \['complete'\]"),
        ({}, {"protocol": "neighbours", "privacy": "plain"}, SimulationError, "these are plain"),
        ({"colluders": 0.9}, {"protocol": "neighbours"}, PolicyError, "cannot be secure"),
        (
            {}, {"protocol": "neighbours", "system": System(), "mode": Pacing(threshold=20)}, PolicyError,
            "threshold: 20; over neighbours",
        ),
    ],
)  # fmt: skip
@pytest.mark.sampled(every=6)
def test_protocols_that_are_not_allowed(
    make: Make, changes: dict[str, Any], given: dict[str, Any], error: type[Exception], match: str
) -> None:
    bundle = bundle_of(make, **changes)
    with pytest.raises(error, match=match):
        archipel.simulate(bundle, fields(24), rounds=1, client_axis="off", **given)


@pytest.mark.sampled(every=4)
def test_the_clock_counts_the_bytes_of_the_protocol_that_a_server_takes(make: Make) -> None:
    bundle = bundle_of(make)

    def first(count: int, **given: Any) -> RoundRow:
        found = archipel.simulate(bundle, fields(count), rounds=1, client_axis="off", system=System(), **given)
        assert found.history[0].failed == ""
        return found.history[0]

    many, complete = first(300), first(300, protocol="complete")
    assert many.bytes_up == first(300, protocol="neighbours").bytes_up
    # 299 envelopes and shares of each of 300 devices in JSON, or 70 in MessagePack.
    assert many.bytes_up * 3 < complete.bytes_up
    assert many.bytes_down * 3 < complete.bytes_down
    assert first(24).bytes_up == first(24, protocol="complete").bytes_up
