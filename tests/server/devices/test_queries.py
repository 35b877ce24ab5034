"""Whom queries may be about: cells of devices that are in the same sums, none of them smaller than the minimum."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from archipel.bundle import decode_manifest
from archipel.protocol.messages import Confirmations, Receipt
from archipel.protocol.uploads import contribution, upload_layout
from archipel.server.database.tables import BundleRow, Round, Task
from archipel.server.devices.queries import _cells, _divide_cells
from tests.support.devices import ANSWERED, Device, Keys
from tests.support.world import World

LEAST = 3
ASK: dict[str, Any] = {"kind": "analytics", "threshold": None, "min_cohort": 3, "deadlines": {"assigning": 5.0}}


@pytest.fixture
def bundle_file(keys: Keys, bundle_maker: Callable[..., Path], tmp_path: Path) -> Path:
    """A bundle whose queries need three contributors."""
    return bundle_maker(tmp_path, keys.publisher, min_cohort=2, policy={"min_contributors": LEAST, "queries": 6})


def ask(
    world: World, there: Sequence[Device], dropping: Sequence[Device] = (), empty: Sequence[Device] = (), **task: Any
) -> tuple[Any, dict[str, Any]]:
    """One query while `there` wait, of which `dropping` send keys and nothing else, and `empty` have no examples; its
    round, None if none began, and the task as it is shown then."""
    made = world.create_task(**{**ASK, "cohort": len(there), **task})
    for device in there:
        device.plan = None
        device.check_in()
    world.settle()
    world.clock.now += 6
    for device in there:
        device.check_in()
    world.settle()
    taken = [device for device in there if device.join()]
    if taken:
        with world.services.database.read() as session:
            manifest = decode_manifest(session.get(BundleRow, made["bundle"]).manifest)
        plan = taken[0].plan
        layout = upload_layout(manifest, plan.kind, plan.program, plan.metrics)
        arrays = {name: np.zeros(shape, np.float32) for name, shape in
                  (("light/sum", ()), ("light/count", ()), ("hours/histogram", (4,)))}  # fmt: skip
        for phase in ANSWERED:
            for device in taken:
                if phase == "masking":
                    if device in dropping:
                        continue
                    values = {**arrays, **contribution(int(device not in empty))}
                    device.vector = layout.encode(values, modulus_bits=plan.modulus_bits, max_cohort=plan.max_cohort)
                elif phase in ("confirming", "unmasking") and (device in dropping or taken[0].status().phase != phase):
                    continue
                device.answer(phase)
            world.settle()
            world.clock.now += 61 if dropping and phase == "masking" else 0
            world.settle()
    rounds = world.rounds(made["task_id"])
    shown = world.task(made["task_id"])
    world.operator("POST", f"/v1/tasks/{made['task_id']}/cancel")
    world.settle()
    return (rounds[0] if rounds else None), shown


def ids(devices: Sequence[Device]) -> list[str]:
    return sorted(device.id for device in devices)


@pytest.mark.sampled(every=8)
def test_devices_that_were_never_asked_come_first(world: World) -> None:
    devices = world.add_devices(8)
    first, _ = ask(world, devices[:4])
    assert (first["phase"], first["survivors"]) == ("committed", ids(devices[:4]))
    second, _ = ask(world, devices, cohort=4)
    assert (second["phase"], second["survivors"]) == ("committed", ids(devices[4:]))
    # Nobody is new now: one of the two sets again, or both together.
    third, _ = ask(world, devices)
    assert (third["phase"], third["survivors"]) == ("committed", ids(devices))


@pytest.mark.sampled(every=4)
def test_a_set_is_asked_again_only_when_it_is_whole(world: World) -> None:
    devices = world.add_devices(5)
    assert ask(world, devices)[0]["phase"] == "committed"
    nothing, shown = ask(world, devices[:4])
    assert nothing is None
    assert shown["waiting_for"] == (
        "4 devices wait, but not such as may be in one sum: with those of earlier queries it would tell of fewer than "
        "min_contributors; a set that was asked before may be asked again when all of it waits"
    )
    again, _ = ask(world, devices)
    assert (again["phase"], again["survivors"]) == ("committed", ids(devices))


@pytest.mark.sampled(every=3)
def test_a_set_may_be_divided_into_two_that_are_large_enough(world: World) -> None:
    devices = world.add_devices(6)
    assert ask(world, devices)[0]["phase"] == "committed"
    half, _ = ask(world, devices[:3])
    assert (half["phase"], half["survivors"]) == ("committed", ids(devices[:3]))
    assert ask(world, devices[1:4])[0] is None


@pytest.mark.sampled(every=3)
def test_a_device_that_drops_out_of_a_repeated_set_ends_the_round_before_anybody_is_told(world: World) -> None:
    devices = world.add_devices(5)
    assert ask(world, devices)[0]["phase"] == "committed"
    failed, _ = ask(world, devices, dropping=devices[:1])
    assert failed["phase"] == "failed"
    assert failed["reason"] == (
        "with the sums of earlier queries this one would tell of 1 device alone, at least 3 are needed "
        "(min_contributors): devices of an earlier query dropped out"
    )
    assert {each["furthest"] for each in failed["participants"]} == {"masking", "complaining"}


@pytest.mark.sampled(every=3)
def test_a_device_that_drops_out_of_a_new_set_does_no_harm(world: World) -> None:
    devices = world.add_devices(5)
    found, _ = ask(world, devices, dropping=devices[:1])
    assert (found["phase"], found["survivors"]) == ("committed", ids(devices[1:]))
    assert found["result"]["contributors"] == 4


@pytest.mark.sampled(every=8)
def test_the_population_is_asked_so_many_times(world: World) -> None:
    devices = world.add_devices(3)
    for _ in range(6):
        assert ask(world, devices)[0]["phase"] == "committed"
    nothing, shown = ask(world, devices)
    assert nothing is None
    assert shown["waiting_for"] == (
        "population 'pupils' was asked 6 times in the last 30 days; the bundle allows 6 queries"
    )
    world.clock.now += 30 * 86400
    for device in devices:
        device.open_session()
    assert ask(world, devices)[0]["phase"] == "committed"


@pytest.mark.sampled(every=4)
def test_with_the_default_policy_thirty_devices_are_asked(
    world: World, bundle_maker: Callable[..., Path], keys: Keys, tmp_path: Path
) -> None:
    policy = {"colluders": 1 / 3, "min_contributors": 20, "queries": 30}
    world.bundle_file = bundle_maker(tmp_path, keys.publisher, name="default", min_cohort=10, policy=policy)
    devices = world.add_devices(30)
    status, answer = world.operator(
        "POST",
        "/v1/tasks",
        {"name": "q", "population": "pupils", "rounds": 1, "min_cohort": 29, "cohort": 30, "kind": "analytics",
         "bundle": world.publish()},
    )  # fmt: skip
    assert status == 422
    assert "min_cohort 29, less 10 that may collude, is below the plan's min_contributors 20;" in answer["detail"]
    assert "at least 30 are needed" in answer["detail"]
    found, shown = ask(world, devices, min_cohort=30)
    assert (found["phase"], found["result"]["contributors"]) == ("committed", 30)
    assert (shown["threshold"], shown["min_contributors"]) == (21, 20)


@pytest.mark.sampled(every=4)
def test_small_cells_of_another_bundle_are_no_obstacle(
    world: World, bundle_maker: Callable[..., Path], keys: Keys, tmp_path: Path
) -> None:
    devices = world.add_devices(9)
    assert ask(world, devices[:3])[0]["phase"] == "committed"
    policy = {"min_contributors": 5, "queries": 6}
    world.bundle_file = bundle_maker(tmp_path, keys.publisher, name="careful", min_cohort=2, policy=policy)
    found, _ = ask(world, devices[3:], min_cohort=5)
    assert (found["phase"], found["survivors"]) == ("committed", ids(devices[3:]))
    # And the careful one's minimum holds for the other bundle as well: of its six no three are asked.
    world.bundle_file = bundle_maker(tmp_path / "again", keys.publisher, policy={"min_contributors": 3, "queries": 6})
    assert ask(world, devices[3:6])[0] is None


def test_what_a_task_may_ask_for(world: World) -> None:
    asked = {"name": "q", "population": "pupils", "rounds": 1, "min_cohort": 3, "cohort": 5, "bundle": world.publish()}
    for changes, words in (
        ({"kind": "analytics", "rounds": 7}, "rounds: 7; bundle 'tiny' allows 6 queries in 30 days"),
        ({"kind": "analytics", "min_contributors": 2}, "min_contributors 2 is below the policy's 3"),
        ({"kind": "analytics", "min_contributors": 4}, "is below the plan's min_contributors 4"),
        ({"min_contributors": 3}, "belongs to evaluations and analyses"),
    ):
        status, answer = world.operator("POST", "/v1/tasks", {**asked, **changes})
        assert (status, words in answer["detail"]) == (422, True), answer


def test_cells_are_the_devices_that_are_in_the_same_sets() -> None:
    rng = random.Random(1)
    for _ in range(100):
        sets = [frozenset(rng.sample("abcdefghij", rng.randint(1, 10))) for _ in range(rng.randint(1, 4))]
        by_hand: dict[tuple[bool, ...], set[str]] = {}
        for device in "abcdefghij":
            where = tuple(device in each for each in sets)
            if any(where):
                by_hand.setdefault(where, set()).add(device)
        assert sorted(map(sorted, _cells(sets))) == sorted(map(sorted, by_hand.values()))


def test_no_combination_of_sums_tells_of_fewer_than_a_cell() -> None:
    """By enumeration: whatever is added up, with whatever factors, a device has its whole cell beside it."""
    sets = [frozenset(range(6)), frozenset(range(3, 9)), frozenset(range(9))]
    assert sorted(map(sorted, _cells(sets))) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    for factors in itertools.product((-2, -1, 0, 1, 2), repeat=3):
        told = [sum(f for f, each in zip(factors, sets) if device in each) for device in range(9)]
        for value in {*told} - {0}:
            assert told.count(value) >= 3


@pytest.mark.sampled(every=4)
def test_a_sum_for_the_upstream_server_counts_whatever_became_of_it(world: World) -> None:
    """Five of six with examples, whose sum went up; then three of them: the difference would be that of two."""
    devices = world.add_devices(6)
    first, _ = ask(world, devices, empty=devices[5:])
    with world.services.database.write() as session:
        # What is left of a round for the upstream server that had its sum and was given up.
        told = session.get_one(Round, first["round_id"])
        told.phase = "failed"
        session.get_one(Task, told.task_id).upstream = "sites"
    failed, _ = ask(world, devices[:3])
    assert failed["phase"] == "failed"
    assert "would tell of fewer than 3 devices with examples alone" in failed["reason"]


@pytest.mark.sampled(every=4)
def test_a_new_cell_needs_contributors_and_not_only_devices(world: World) -> None:
    """Five with examples, then these and four more of which one has any: the difference would be that one's."""
    devices = world.add_devices(9)
    assert ask(world, devices[:5])[0]["phase"] == "committed"
    failed, _ = ask(world, devices, empty=devices[6:], min_cohort=9)
    assert failed["phase"] == "failed"
    assert failed["reason"] == (
        "aggregation: with the sums of earlier queries this one would tell of fewer than 3 devices with examples alone "
        "(min_contributors); nothing of it was kept"
    )
    assert (failed["result"], failed["weight_sum"]) == (None, None)


@pytest.mark.sampled(every=3)
def test_wrong_shares_are_noted_where_the_query_then_fails_for_want_of_contributors(world: World) -> None:
    devices = world.add_devices(7)
    liar = devices[3]
    honest = liar.answer

    def lies(phase: str) -> None:
        if phase != "unmasking":
            honest(phase)
            return
        answer = liar.participant.unmask(liar.ask("GET", f"{liar.round}/confirmations", Confirmations))
        shares = [each.share for each in answer.self_seeds]
        # Each a share, but of another device's seed.
        wrong = [msgspec.structs.replace(each, share=shares[i - 1]) for i, each in enumerate(answer.self_seeds)]
        liar.ask("PUT", f"{liar.round}/unmasking", Receipt, msgspec.structs.replace(answer, self_seeds=wrong))

    liar.answer = lies
    failed, _ = ask(world, devices, empty=devices[2:], min_cohort=5, threshold=5)
    assert failed["phase"] == "failed"
    assert failed["reason"].startswith("aggregation: ")
    assert failed["faults"] == [{"device_id": liar.id, "reason": "wrong unmasking shares"}]
    assert (failed["result"], failed["weight_sum"]) == (None, None)


@pytest.mark.sampled(every=4)
def test_what_is_left_of_a_divided_cell_needs_contributors_too(world: World) -> None:
    devices = world.add_devices(7)
    first, _ = ask(world, devices, empty=devices[:2])
    assert first["result"]["contributors"] == 5
    # Three of the five: two with examples would be left by themselves.
    assert ask(world, devices[2:5])[0]["phase"] == "failed"


def test_contributors_by_cell_are_counted_exactly() -> None:
    a, b, c = frozenset("abc"), frozenset("def"), frozenset("ghi")
    counts = _divide_cells({}, a | b, 5)
    assert counts == {a | b: 5}
    assert _divide_cells(counts, a, 3) == {a: 3, b: 2}
    assert _divide_cells({a: 3, b: 2}, a | b | c, 6) == {a: 3, b: 2, c: 1}
    assert _divide_cells({a: 3, b: 2}, b, 1) == {a: 3, b: 2}
    # Two new cells at once: how many are in which cannot be told.
    assert _divide_cells({a: 3, b: 2}, frozenset("abde"), 3) is None
    assert _divide_cells({a: 3}, frozenset("abgh"), 3) is None
