"""Rounds that are really masked end where those without masks end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import archipel
from archipel.bundle import Bundle
from archipel.errors import SimulationError
from archipel.protocol.secagg import masks
from archipel.simulation import masked
from tests.simulation.test_engines import bundle_of, fields

Make = Callable[..., Bundle]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_masked_rounds_give_the_same_model(make: Make, dropout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = bundle_of(make, "fedavg")
    unmasked: list[int] = []
    real = masked.unmask_sum

    def count(total: Any, **given: Any) -> Any:
        plain = real(total, **given)
        # What the server adds up looks nothing like the sum, and some of those that shared keys are not in it.
        assert np.mean(total == plain) < 0.2
        unmasked.append(len(given["sharers"]) - len(given["survivors"]))
        return plain

    monkeypatch.setattr(masked, "unmask_sum", count)
    given: dict[str, Any] = {"rounds": 6, "dropout": dropout, "client_axis": "off", "seed": 4}
    found = archipel.simulate(bundle, fields(), **given, masks=True)
    expected = archipel.simulate(bundle, fields(), **given)
    alone = [row.number for row in expected.history if row.devices == 1]
    assert not alone, "a masked round of one device fails, so the models would differ"
    for name, value in expected.parameters.items():
        np.testing.assert_array_equal(found.parameters[name], value)
    assert len(unmasked) == 6
    assert (max(unmasked) > 0) == (dropout > 0)


def test_a_sum_of_one_device_is_not_made(make: Make) -> None:
    found = archipel.simulate(bundle_of(make, "fedavg"), fields(), rounds=1, cohort=1, masks=True, client_axis="off")
    assert found.history[0].failed == "no device's update came"
    assert found.clients[next(iter(found.clients))].counted == 0


def test_a_wrong_sum_is_noticed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masked, "add_masked", lambda total, vector, bits: masks.add_masked(total, vector ^ 1, bits))
    with pytest.raises(SimulationError, match="round 1: the unmasked sum is not that of the devices' vectors"):
        archipel.simulate(bundle_of(make, "fedavg"), fields(), rounds=1, masks=True, client_axis="off")


@pytest.mark.sampled(every=3)
def test_plain_rounds_have_no_masks(make: Make) -> None:
    with pytest.raises(SimulationError, match="masks: a round with privacy 'plain' has none"):
        archipel.simulate(bundle_of(make, "fedavg"), fields(), rounds=1, privacy="plain", masks=True)
