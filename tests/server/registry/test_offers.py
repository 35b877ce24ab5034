"""What devices are told to run: by their place, what they report and what they run; and what that costs."""

from __future__ import annotations

import time

import pytest
from sqlalchemy import event

from archipel.errors import CertificateError
from archipel.protocol import messages
from archipel.protocol.sealed import unseal
from archipel.server.database.tables import CheckInRow
from tests.support.devices import POPULATION, Device
from tests.support.fleet import MODEL, Fleet
from tests.support.world import World

STAGES = [{"percent": 50, "soak_seconds": 60}, {"percent": 100, "soak_seconds": 60}]


def offered(device: Device) -> dict[str, int]:
    assert device.check_in() is None
    return {each.model: each.version for each in device.offers}


def test_the_promoted_version_is_offered_to_who_asks_and_has_not_fetched_it(world: World, fleet: Fleet) -> None:
    silent, asking = world.add_devices(2)
    asking.versions = {}
    assert (offered(silent), offered(asking)) == ({}, {MODEL: 1})
    [offer] = asking.offers
    assert (offer.bundle, offer.weights, offer.rollout) == (fleet.bundles[0], None, None)
    assert offer.population == POPULATION
    asking.versions = {MODEL: 1}
    assert offered(asking) == {}
    fleet.promote(2)
    assert offered(asking) == {MODEL: 2}
    assert asking.offers[0].serial > offer.serial
    asking.versions = {MODEL: 2, "words": 7}
    assert offered(asking) == {}
    fleet.post(f"models/{MODEL}/rollback")
    assert offered(asking) == {MODEL: 1}


def test_nothing_is_offered_where_nothing_was_promoted(world: World) -> None:
    Fleet(world).create(promote=None)
    (device,) = world.add_devices(1)
    device.versions = {}
    assert offered(device) == {}


def test_an_answer_to_an_old_agent_is_what_it_knows(world: World, fleet: Fleet) -> None:
    """It decodes strictly, so a field that it does not know would end its federation."""
    (device,) = world.add_devices(1)
    status, answer = device.call("POST", "/v1/check-ins", b'{"attributes":{}}')
    assert status == 200
    assert set(answer) <= {"plan", "retry_after"}


def test_an_offer_is_signed_for_nothing_else(world: World, fleet: Fleet) -> None:
    (device,) = world.add_devices(1)
    request = messages.CheckIn(versions={})
    [sealed] = device.ask("POST", "/v1/check-ins", messages.CheckInResponse, request).offers
    assert unseal("offer", sealed, world.settings.public_key, messages.Offer).model == MODEL
    # A device that has one is not kept waiting for a round.
    began = time.monotonic()
    assert device.ask("POST", "/v1/check-ins", messages.CheckInResponse, messages.CheckIn(versions={}, wait=15)).offers
    assert time.monotonic() - began < 10
    with pytest.raises(CertificateError):
        unseal("plan", sealed, world.settings.public_key, messages.Offer)


@pytest.mark.sampled(every=4)
def test_devices_of_the_stage_are_offered_the_new_version_and_the_others_the_old(world: World, fleet: Fleet) -> None:
    rollout = fleet.begin(gate="none", stages=STAGES)
    inside, outside = fleet.enrol(rollout, 4, 4)
    assert [offered(device) for device in [*inside, *outside]] == [{MODEL: 2}] * 4 + [{MODEL: 1}] * 4
    assert {device.offers[0].rollout for device in inside} == {rollout["rollout_id"]}
    assert {device.offers[0].rollout for device in outside} == {None}
    world.clock.now += 60
    world.settle()  # the next stage has all of them
    for device in [*inside, *outside]:
        device.versions = {MODEL: 2 if device in inside else 1}
    assert [offered(device) for device in [*inside, *outside]] == [{}] * 4 + [{MODEL: 2}] * 4
    world.clock.now += 60
    world.settle()
    assert fleet.show(rollout)["state"] == "completed"
    for device in outside:
        assert offered(device) == {MODEL: 2}
        assert device.offers[0].rollout is None


@pytest.mark.parametrize("way", ["gate", "abort", "model rollback", "too late"])
@pytest.mark.sampled(every=6)
def test_after_a_rollback_the_stage_is_offered_the_old_version_again(world: World, fleet: Fleet, way: str) -> None:
    rollout = fleet.begin(stages=STAGES)
    inside, outside = fleet.enrol(rollout, 3, 1)
    for device in [*inside, *outside]:
        [(_, number)] = offered(device).items()
        device.versions = {MODEL: number}
    if way == "gate":
        fleet.pass_stage(rollout, inside, 0.1, 0.9)
    elif way == "abort":
        fleet.post(f"rollouts/{rollout['rollout_id']}/abort")
    elif way == "model rollback":
        fleet.post(f"models/{MODEL}/rollback")
    else:
        for _ in range(2):
            world.clock.now = fleet.show(rollout)["state_ends"]
            world.settle()
    assert fleet.show(rollout)["state"] == "rolled_back"
    fleet.reopen([*inside, *outside])
    assert [offered(device) for device in [*inside, *outside]] == [{MODEL: 1}] * 3 + [{}]


def test_what_a_device_reports_decides_whether_it_is_in_the_stage(world: World, fleet: Fleet) -> None:
    fleet.begin(gate="none", stages=[{"percent": 100, "soak_seconds": 60}], eligibility='app >= "2.0"')
    (device,) = world.add_devices(1)
    device.versions = {}
    assert offered(device) == {MODEL: 1}
    device.attributes = {"app": "2.1"}
    assert offered(device) == {MODEL: 2}
    device.attributes = {"app": "1.9"}
    assert offered(device) == {MODEL: 1}


def test_each_model_is_offered_for_itself_and_to_its_own_population(world: World, fleet: Fleet) -> None:
    for name, population in (("words", POPULATION), ("notes", "teachers")):
        fleet.post("models", {"name": name, "population": population}, 201)
        fleet.post(f"models/{name}/versions", {"bundle": fleet.bundles[1]}, 201)
        fleet.post(f"models/{name}/promote", {"version": 1})
    (device,) = world.add_devices(1)
    device.versions = {}
    assert offered(device) == {MODEL: 1, "words": 1}
    device.versions = {MODEL: 1}
    assert offered(device) == {"words": 1}


def test_a_population_has_so_many_models_that_an_answer_can_name_all(world: World, fleet: Fleet) -> None:
    for number in range(messages.MAX_MODELS - 1):
        fleet.post("models", {"name": f"m{number}", "population": POPULATION}, 201)
    answer = fleet.post("models", {"name": "more", "population": POPULATION}, 422)
    assert "has 16 models" in answer["detail"]
    fleet.post("models", {"name": "more", "population": "teachers"}, 201)


@pytest.mark.sampled(every=3)
def test_how_many_devices_fetched_which_version(world: World, fleet: Fleet) -> None:
    devices = world.add_devices(6)
    for device, runs in zip(devices, (None, {}, {MODEL: 1}, {MODEL: 1}, {MODEL: 2, "words": 1}, {"words": 1})):
        device.versions = runs
        device.check_in()

    def counts() -> list[int]:
        return [each["downloaded"] for each in fleet.get(f"models/{MODEL}/versions")["items"]]

    assert counts() == [1, 2]  # newest first
    devices[2].versions = {MODEL: 2}
    devices[2].check_in()
    assert counts() == [2, 1]
    devices[2].versions = {MODEL: 999_999_999}  # whatever a device says
    devices[2].check_in()
    assert counts() == [1, 1]
    assert fleet.get(f"models/{MODEL}/versions/2")["downloaded"] == 1
    # Those that were revoked, or have not come for long, count no more.
    fleet.post(f"devices/{devices[4].id}/revoke")
    assert counts() == [0, 1]
    world.clock.now += 30 * 86400 + 1
    assert counts() == [0, 0]


@pytest.mark.sampled(every=4)
def test_a_device_in_a_round_is_offered_versions_too(world: World, fleet: Fleet) -> None:
    """One that goes from round to round never comes without one."""
    devices = world.add_devices(3)
    for device in devices:
        device.versions = {MODEL: 1}
    world.create_task(cohort=3, min_cohort=3)
    world.start_round(devices)
    fleet.promote(2)
    for device in devices:
        assert device.check_in() is not None
        assert [offer.version for offer in device.offers] == [2]
    devices[0].versions = {MODEL: 2}
    assert devices[0].check_in() is not None
    assert devices[0].offers == []
    assert fleet.get(f"models/{MODEL}/versions/2")["downloaded"] == 1


def test_what_a_device_fetched_is_written_when_it_changes_only(world: World) -> None:
    (device,) = world.add_devices(1)

    def stored() -> dict[str, int] | None:
        with world.services.database.read() as session:
            return session.get_one(CheckInRow, device.id).versions

    device.check_in()
    assert stored() is None
    for told in ({}, {MODEL: 3}, {MODEL: 4}, None):
        device.versions = told
        device.check_in()
        assert stored() == told


@pytest.fixture
def statements(world: World) -> list[str]:
    """What the web application asks its database."""
    seen: list[str] = []

    def record(connection: object, cursor: object, statement: str, *more: object) -> None:
        if statement not in ("BEGIN", "COMMIT", "ROLLBACK"):
            seen.append(statement)

    event.listen(world.app.extensions["archipel"].database.engine, "before_cursor_execute", record)
    return seen


def cost(statements: list[str], device: Device) -> int:
    statements.clear()
    device.check_in()
    return len(statements)


@pytest.mark.sampled(every=3)
def test_an_offer_costs_a_polling_device_no_query(world: World, statements: list[str]) -> None:
    old, new = world.add_devices(2)
    new.versions = {}
    for device in (old, new):
        device.check_in()  # the first one writes
    usual = cost(statements, old)
    assert cost(statements, new) == usual
    fleet = Fleet(world).create()
    assert cost(statements, new) == usual + 1  # what is offered now is read once for all devices
    assert [each.version for each in new.offers] == [1]
    assert cost(statements, new) == usual
    assert cost(statements, old) == usual
    fleet.begin(gate="none", stages=STAGES)
    assert cost(statements, new) == usual + 1
    assert cost(statements, new) == usual


@pytest.mark.sampled(every=3)
def test_another_web_process_knows_at_once(world: World, fleet: Fleet) -> None:
    """Nothing is kept for some seconds: what was rolled back is offered by nobody any more."""
    from archipel.server.app import create_app

    other = create_app(world.settings, clock=world.clock)
    first = world.app
    (device,) = world.add_devices(1)
    device.versions = {}
    for app in (first, other):
        world.app = app
        assert offered(device) == {MODEL: 1}
    world.app = first
    fleet.promote(2)
    world.app = other
    assert offered(device) == {MODEL: 2}
    fleet.post(f"models/{MODEL}/rollback")
    world.app = first
    assert offered(device) == {MODEL: 1}
    other.extensions["archipel"].database.dispose()


@pytest.mark.sampled(every=3)
def test_a_serial_never_goes_back(world: World, fleet: Fleet) -> None:
    """Not even where a database is put back from a backup, as long as time goes on."""
    (device,) = world.add_devices(1)
    device.versions = {}
    serials = []
    for number in (2, 1, 2):
        fleet.promote(number)
        device.check_in()
        serials.append(device.offers[0].serial)
    assert serials == sorted(set(serials))
    assert serials[0] >= world.clock.now * 1000
