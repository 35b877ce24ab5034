"""A server wants one device's update out of a round whose updates are packed.

What it chooses there: the seed of the rotation, the bases of low-rank updates, and how many bits a masked entry has. A
device whose matrix meets other bases than its peers' would be alone in the sum, and bases that are none make what the
device keeps for later rounds grow without end. What stops the server: all of that is in the plan or named by it, and
devices of one cohort have one plan; a device takes only orthonormal bases, a seed of the signed range, and enough bits.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from archipel.bundle import Bundle, PrivacyPolicy, pack
from archipel.client.downloads.origins import check_broadcast
from archipel.errors import ArchipelError, PolicyError, ProvenanceError, SecureAggregationError
from archipel.lite_runtime import Runtime
from archipel.protocol.messages import Cohort, Member
from archipel.protocol.policy import check_plan, plan_digest
from archipel.protocol.sealed import public_bytes, seal
from archipel.protocol.secagg import Participant
from archipel.protocol.secagg.cohort import hand_out_keys
from archipel.protocol.secagg.key_tree import KeyTree
from archipel.protocol.uploads import plan_layout
from archipel.strategies.update_compression import first_bases
from tests.support.devices import Device, Keys
from tests.support.fixtures.server import *  # noqa: F403
from tests.support.fixtures.strategies import make as make
from tests.support.simulation import clients
from tests.support.world import World

POLICY = PrivacyPolicy(
    modes=("secure", "plain"), min_cohort=3, threshold=0.6, max_clip=1.0, max_bits=24, colluders=0.0
)  # fmt: skip
Open = Callable[..., tuple[Bundle, list[Device]]]


@pytest.fixture
def begin(world: World, keys: Keys, make: Callable[..., Bundle]) -> Open:
    """A bundle with these options, and four devices that have joined a secure round of it."""

    def begun(**options: Any) -> tuple[Bundle, list[Device]]:
        bundle = make(
            "fedavg", key=keys.publisher, privacy=POLICY, strategy_options={"clip": 1.0, "bits": 4, **options}
        )
        world.bundle_file = bundle.folder.with_suffix(".bundle")
        pack(bundle.folder, world.bundle_file)
        world.create_task(privacy="secure", cohort=4, threshold=3)
        devices = world.add_devices(4)
        world.start_round(devices)
        return bundle, devices

    return begun


@pytest.mark.parametrize("change", [{"hyperparameters": {"update_seed": 7.0}}, {"broadcast": "0" * 64}])
@pytest.mark.sampled(every=4)
def test_no_device_gets_a_seed_or_bases_of_its_own(
    begin: Open, world: World, keys: Keys, change: dict[str, Any]
) -> None:
    compress = {"compress": "low_rank", "compress_rank": 1} if "broadcast" in change else {"compress": "rotation"}
    _, devices = begin(**compress)
    alone = devices[0]
    assert alone.plan is not None
    alone.plan = msgspec.structs.replace(alone.plan, **change)
    sealed = seal("plan", alone.plan, world.settings.private_key)
    alone.participant = Participant(
        alone.plan, plan_digest(sealed), alone.key, alone.chain, public_bytes(keys.enrolment), secrets.token_bytes
    )
    members, trees = [], {}
    for device in devices:
        made = device.participant.advertise()
        members.append(Member(chain=device.chain, advertisement=made.advertisement))
        trees[device.id] = KeyTree(made.envelope_keys, alone.plan.max_cohort)
    for device in devices:
        cohort = Cohort(members=members, keys=hand_out_keys(trees, device.id))
        with pytest.raises(SecureAggregationError, match=r"advertisement: expected round .* and plan .*, got .* plan"):
            device.participant.share(cohort)


def test_devices_refuse_what_are_no_bases(make: Callable[..., Bundle]) -> None:
    bundle = make("fedavg", strategy_options={"clip": 1.0, "compress": "low_rank", "compress_rank": 2})
    good = first_bases(bundle.manifest)
    check_broadcast(bundle, good, 3)
    for name, basis in good.items():
        same = np.zeros_like(basis)
        same[0] = 1.0  # both columns are the same one, of norm 1
        for crafted in (same, np.zeros_like(basis), 1.01 * basis, basis + np.float32(np.nan), -2 * basis):
            with pytest.raises(ProvenanceError, match=r"low-rank basis .*: its columns are not orthonormal"):
                check_broadcast(bundle, {**good, name: crafted}, 3)
        with pytest.raises(ProvenanceError, match=r"low-rank basis .*: expected float32"):
            check_broadcast(bundle, {**good, name: basis[:, :1]}, 3)


def test_devices_refuse_a_seed_out_of_its_range(make: Callable[..., Bundle]) -> None:
    bundle = make("fedavg", strategy_options={"clip": 1.0, "bits": 4, "compress": "rotation"})
    x, y = clients()[0]
    for seed in (-1.0, float(1 << 24), float("nan"), float("inf")):
        with pytest.raises(ArchipelError, match="update_seed"):
            Runtime(bundle).local_round(x, y, seed=1, hyperparameters={"update_seed": seed})


@pytest.mark.sampled(every=3)
def test_devices_refuse_masks_of_too_few_bits(begin: Open) -> None:
    bundle, devices = begin(compress="rotation")
    plan = devices[0].plan
    assert plan is not None
    assert plan.narrow
    layout = plan_layout(plan, bundle.manifest)
    check_plan(plan, bundle.manifest.privacy, layout)
    # The other entries have 16 bits: four of them need 18, of which a plan has whole bytes.
    assert plan.modulus_bits == 24
    for bits in (8, 16, 17):
        fewer = msgspec.structs.replace(plan, modulus_bits=bits)
        with pytest.raises(PolicyError, match=f"a modulus of {bits} bits can overflow with max_cohort 4"):
            check_plan(fewer, bundle.manifest.privacy, layout)


@pytest.mark.sampled(every=4)
def test_devices_refuse_to_mask_places_of_their_own(begin: Open, make: Callable[..., Bundle]) -> None:
    """The largest elements of each device are its own, so a mask over them would hide nothing of which they are."""
    _, devices = begin(compress="rotation")
    plan = devices[0].plan
    assert plan is not None
    bundle = make("fedavg", privacy=POLICY, strategy_options={"clip": 1.0, "compress": "top_k"})
    with pytest.raises(PolicyError, match="whose masks do not cancel"):
        check_plan(plan, bundle.manifest.privacy, plan_layout(plan, bundle.manifest))
