"""A bundle expires after its version was promoted, or while it is being rolled out: the server offers it to nobody, as
devices would refuse it, says so to operators, and takes nothing back because of it."""

from __future__ import annotations

from typing import Literal

import pytest

from tests.server.registry.test_offers import offered
from tests.support.devices import START
from tests.support.fleet import GATE, MODEL, STAGES, Fleet
from tests.support.world import World

END = int(START) + 100
"""2027-01-15 08:01:40 UTC."""


@pytest.fixture
def ending(world: World) -> Fleet:
    """Two versions that end at END, the first of them promoted; a third without end."""
    fleet = Fleet(world).create(0, promote=None)
    for not_after in (END, END, 0):
        assert fleet.add_version(not_after=not_after)["not_after"] == not_after
    fleet.promote(1)
    return fleet


@pytest.mark.sampled(every=4)
def test_an_offer_ends_with_its_bundle(world: World, ending: Fleet) -> None:
    known, new = world.add_devices(2)
    known.versions, new.versions = {MODEL: 1}, {}
    world.clock.now = float(END)  # the last second
    assert (offered(known), offered(new)) == ({}, {MODEL: 1})
    assert ending.model()["not_offered"] == ""
    world.clock.now = END + 1.0
    # Also from the web process that has signed it already; and nobody is told to give up what runs.
    assert (offered(known), offered(new)) == ({}, {})
    said = ending.model()["not_offered"]
    assert said.startswith("the bundle of version 1 expired at 2027-01-15 08:01:40Z")
    assert "promote a version of a newer bundle" in said
    assert ending.get("models")["items"][0]["not_offered"] == said
    assert ending.get(f"models/{MODEL}/versions/1")["not_after"] == END
    ending.promote(3)
    assert ending.model()["not_offered"] == ""
    assert (offered(known), offered(new)) == ({MODEL: 3}, {MODEL: 3})


@pytest.mark.sampled(every=3)
def test_what_has_expired_is_not_promoted_and_not_rolled_out(world: World, ending: Fleet) -> None:
    asked = {"model": MODEL, "version": 2, "stages": STAGES}
    world.clock.now = END + 1.0
    for path, body in (
        (f"models/{MODEL}/promote", {"version": 2}), ("rollouts", {**asked, "gate": "none"}),
        ("rollouts", {**asked, "gate": GATE}),
    ):  # fmt: skip
        said = ending.post(path, body, 422)["detail"]
        assert "'tiny2': it expired at 2027-01-15 08:01:40Z, here it is 2027-01-15 08:01:41Z" in said
    # A comparison needs the promoted version, too; a bound of its own does not.
    compared = {**asked, "version": 3, "gate": GATE}
    assert "'tiny1': it expired" in ending.post("rollouts", compared, 422)["detail"]
    ending.post("rollouts", {**compared, "gate": {**GATE, "max_loss": None, "worst": 0.5}}, 201)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("gate", "reason"), [("none", "bundle 'tiny2'"), ({}, "the evaluation cannot be made: bundle 'tiny2'")]
)
def test_a_rollout_whose_version_expires_is_rolled_back(
    world: World, ending: Fleet, gate: dict[str, float] | Literal["none"], reason: str
) -> None:
    rollout = ending.begin(gate=gate, stages=[{"percent": 100, "soak_seconds": 200}])
    (device,) = world.add_devices(1)
    device.versions = {}
    assert offered(device) == {MODEL: 2}
    world.clock.now = END + 1.0
    assert offered(device) == {}
    world.clock.now = START + 200
    world.settle()
    shown = ending.show(rollout)
    assert shown["state"] == "rolled_back"
    assert shown["reason"].startswith(f"{reason}: it expired at 2027-01-15 08:01:40Z")
    assert ending.model()["promoted"] == 1
    assert ending.get(f"models/{MODEL}/versions/2")["state"] == "registered"  # nothing is wrong with it


@pytest.mark.sampled(every=3)
def test_going_back_to_what_has_expired_ends_the_offers_and_says_so(world: World, ending: Fleet) -> None:
    """A bad version must not stay on offer because the one before it has expired."""
    ending.promote(3)
    world.clock.now = END + 1.0
    (device,) = world.add_devices(1)
    device.versions = {}
    assert offered(device) == {MODEL: 3}
    done = ending.post(f"models/{MODEL}/rollback")
    assert (done["promoted"], done["not_offered"][:23]) == (1, "the bundle of version 1")
    assert offered(device) == {}
