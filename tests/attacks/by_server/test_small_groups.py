"""A server wants to see what few devices send: it deals a cohort out to secure groups, and makes one of them small.

Devices know of no groups; each sees a secure round. What stops the server is what devices ask of every secure round:
the policy's `min_cohort`, in the plan that they are given and in the cohort that they share secrets with.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from archipel.bundle import Bundle, open_bundle
from archipel.errors import PolicyError, SecureAggregationError
from archipel.protocol.policy import check_plan
from archipel.protocol.uploads import plan_layout
from archipel.server.rounds import machine
from archipel.server.rounds.groups import grouping
from tests.attacks.faults_world import *  # noqa: F403
from tests.support.world import World


def small_first(devices: Sequence[str], groups: int) -> list[list[str]]:
    return [list(devices[:2]), *([device] for device in devices[2 : groups + 1])]


@pytest.mark.sampled(every=4)
def test_a_group_that_is_smaller_than_its_plan_says_gets_no_shares(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouping, "deal", small_first)
    monkeypatch.setattr(machine, "required", lambda task, rule: 1)  # the server itself would let such a group fail
    world.create_task(min_cohort=3, cohort=9, threshold=2, secure_groups=3)
    devices = world.add_devices(9)
    for device in devices:
        device.check_in()
    world.settle()
    few = [device for device in devices if device.join()]
    assert len(few) == 4
    for device in few:
        device.advertising()
    world.settle()
    assert {device.status().phase for device in few} == {"sharing"}
    for device in few:
        with pytest.raises(SecureAggregationError, match=r"cohort: [12], the plan needs 3; leaving the round"):
            device.sharing()


@pytest.mark.sampled(every=3)
def test_a_plan_of_a_group_below_the_policy_is_refused(world: World) -> None:
    world.create_task(min_cohort=3, cohort=9, threshold=2, secure_groups=3)
    devices = world.add_devices(9)
    world.start_round(devices)
    plan, settings = devices[0].plan, world.settings
    assert plan is not None
    bundle: Bundle = open_bundle(world.bundle_file, settings.trusted_keys, settings.bundle_folder)
    manifest = bundle.manifest
    layout = plan_layout(plan, manifest)
    check_plan(plan, manifest.privacy, layout)
    with pytest.raises(PolicyError, match="min_cohort 2 is below the policy's 3"):
        check_plan(msgspec.structs.replace(plan, min_cohort=2), manifest.privacy, layout)
    with pytest.raises(PolicyError, match="threshold 1 of max_cohort 3 is below the policy's ratio"):
        check_plan(msgspec.structs.replace(plan, threshold=1), manifest.privacy, layout)
