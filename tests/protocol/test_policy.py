from __future__ import annotations

import hashlib

import msgspec
import pytest
from msgspec.structs import replace

from archipel.bundle.manifest import PrivacyPolicy
from archipel.bundle.roles import Program, Update
from archipel.errors import PolicyError
from archipel.protocol import Layout, check_plan, plan_digest, seal
from archipel.protocol.policy import colluders_of, endorsers_needed, least_cohort, splits
from archipel.protocol.secagg_plus.sizes import Assumptions, choose_sizes_between

POLICY = PrivacyPolicy(modes=("secure",), min_cohort=10, threshold=0.56, max_clip=2.0, max_bits=16, colluders=0.0)
GOOD = {"privacy": "secure", "min_cohort": 10, "max_cohort": 25, "threshold": 14, "modulus_bits": 24}


def layout(**changes: object) -> Layout:
    delta = Update(
        name="w",
        dtype="float32",
        shape=(4,),
        tensor="w",
        kind="delta",
        weighting="examples",
        range=1.0,
        bits=16,
        clip=2.0,
    )
    weight = Update(
        name="n", dtype="float32", shape=(), tensor="n", kind="weight", weighting="examples", range=100.0, bits=16
    )
    return Layout.of(Program(kind="finish", inputs=(), outputs=(msgspec.structs.replace(delta, **changes), weight)))


def test_a_plan_at_every_bound(make_plan):
    # 0.56 of 25 is 14 exactly, though not in floating point.
    assert 0.56 * 25 > 14
    check_plan(make_plan(**GOOD), POLICY, layout())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"privacy": "plain"}, "mode 'plain'"),
        ({"min_cohort": 9}, "min_cohort 9"),
        ({"threshold": 13}, "threshold 13"),
        ({"max_cohort": 26}, "threshold 14 of max_cohort 26"),
        ({"colluders": 1}, "colluders 1 of max_cohort 25: the policy withstands 0"),
        ({"max_cohort": 9}, "max_cohort 9"),
        ({"threshold": 26}, "max_cohort 25"),
        ({"modulus_bits": 20}, "modulus of 20 bits"),
    ],
)
def test_plans_outside_the_policy(make_plan, change, why):
    with pytest.raises(PolicyError, match=why):
        check_plan(make_plan(**{**GOOD, **change}), POLICY, layout())


@pytest.mark.parametrize(
    ("change", "why"),
    [({"bits": 17}, "17 bits"), ({"clip": 2.1}, "clipped to 2.1"), ({"clip": None}, "is not clipped")],
)
def test_updates_outside_the_policy(make_plan, change, why):
    with pytest.raises(PolicyError, match=why):
        check_plan(make_plan(**{**GOOD, "modulus_bits": 32}), POLICY, layout(**change))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"range": 1000.0, "shape": (4,)}, "norm of 2000"),
        ({"range": 2000.0, "shape": (4,), "clip": 1001.0}, "norm of 1001"),
    ],
)
def test_values_outside_the_policy(make_plan, change, why):
    """1000 times the root of four elements, and a clip: both are what one device adds at most."""
    policy = msgspec.structs.replace(POLICY, max_value=1000.0)
    value = {"kind": "value", "clip": None, **change}
    good = {**value, "range": 500.0} if value["clip"] is None else {**value, "clip": 1000.0}
    check_plan(make_plan(**{**GOOD, "modulus_bits": 32}), policy, layout(**good))
    with pytest.raises(PolicyError, match=rf"{why} .*the policy allows 1000 \(max_value\)"):
        check_plan(make_plan(**{**GOOD, "modulus_bits": 32}), policy, layout(**value))


def test_every_device_weighs_one_where_the_policy_says_so(make_plan):
    uniform = msgspec.structs.replace(POLICY, weighting="uniform")
    with pytest.raises(PolicyError, match="weighted by examples, the policy wants every device to weigh 1"):
        check_plan(make_plan(**GOOD), uniform, layout())
    alone = Layout((msgspec.structs.replace(layout().updates[0], weighting="uniform"),))
    check_plan(make_plan(**GOOD), uniform, alone)
    # What evaluations weigh their means with is no training's weight.
    asked = msgspec.structs.replace(uniform, min_contributors=10)
    check_plan(make_plan(**GOOD, kind="evaluation", min_contributors=10), asked, layout())


def test_half_is_not_enough_even_if_the_policy_says_so(make_plan):
    loose = msgspec.structs.replace(POLICY, threshold=0.5)
    with pytest.raises(PolicyError, match="more than half"):
        check_plan(make_plan(**{**GOOD, "max_cohort": 28}), loose, layout())


# A third of 25 are 8 (8.33): more than (25 + 8) / 2 = 16.5 must agree, and 10 + 8 be in the sum.
THIRD = msgspec.structs.replace(POLICY, colluders=1 / 3)
WITHSTANDS = {**GOOD, "min_cohort": 18, "threshold": 17, "colluders": 8}


def test_a_plan_that_withstands_a_third(make_plan):
    check_plan(make_plan(**WITHSTANDS), THIRD, layout())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"threshold": 16}, "threshold 16 is not more than half of max_cohort 25 and 8 colluders together"),
        ({"min_cohort": 17}, "min_cohort 17, less 8 that may collude, is below the policy's 10; at least 18"),
        ({"colluders": 7}, "colluders 7 of max_cohort 25: the policy withstands 8"),
        ({"colluders": 0, "threshold": 14}, "the policy withstands 8"),
    ],
)
def test_plans_that_withstand_fewer(make_plan, change, why):
    with pytest.raises(PolicyError, match=why):
        check_plan(make_plan(**{**WITHSTANDS, **change}), THIRD, layout())


@pytest.mark.parametrize(
    ("share", "cohort", "expected"),
    [
        (1 / 3, 3, 1), (1 / 3, 12, 4), (1 / 3, 25, 8), (1 / 3, 4096, 1365),
        # 0.29 * 100 in floating point is 28.999999999999996.
        (0.29, 100, 29), (0.0, 4096, 0), (0.999, 10, 9),
    ],
)  # fmt: skip
def test_shares_of_colluders_are_exact(share, cohort, expected):
    assert colluders_of(msgspec.structs.replace(POLICY, colluders=share), cohort) == expected


# By hand: no group of `threshold` besides that of the colluders and others may be possible. n = 5, t = 3: one device
# that confirms to both sides is enough for {1, 2, c} and {3, 4, c}; n = 20, t = 11: two for 9 + 9 others.
@pytest.mark.parametrize(
    ("threshold", "devices", "colluders", "can"),
    [(3, 5, 0, False), (3, 5, 1, True), (4, 5, 1, False), (11, 20, 1, False), (11, 20, 2, True), (14, 20, 6, False),
     (13, 20, 6, True), (2, 4, 0, True)],
)  # fmt: skip
def test_when_a_server_can_have_two_groups_confirm(threshold, devices, colluders, can):
    assert splits(threshold, devices, colluders) is can


def query(make_plan, **changes):
    asked = {**WITHSTANDS, "kind": "analytics", "program": "look", "min_contributors": 10, **changes}
    return make_plan(**asked)


def test_queries_keep_to_the_least_number_of_contributors(make_plan):
    policy = msgspec.structs.replace(THIRD, min_contributors=10)
    check_plan(query(make_plan), policy, layout())
    with pytest.raises(PolicyError, match="min_contributors 9 is below the policy's 10"):
        check_plan(query(make_plan, min_contributors=9), policy, layout())
    # More may be asked for; then so many must be in the sum beside the colluders.
    with pytest.raises(PolicyError, match="below the plan's min_contributors 11; at least 19"):
        check_plan(query(make_plan, min_contributors=11), policy, layout())


def test_the_default_is_twenty_contributors(make_plan):
    with pytest.raises(PolicyError, match="below the policy's 20"):
        check_plan(query(make_plan, min_contributors=19, min_cohort=25), THIRD, layout())


def test_plain_rounds_share_no_secrets(make_plan):
    plain = msgspec.structs.replace(POLICY, modes=("plain",))
    check_plan(make_plan(**{**GOOD, "privacy": "plain", "threshold": 1}), plain, layout())


def test_the_digest_is_over_the_signed_bytes(make_plan, signing_key):
    sealed = seal("plan", make_plan(), signing_key("server"))
    assert plan_digest(sealed) == hashlib.sha256(sealed.body).hexdigest()


@pytest.fixture
def over_neighbours(make_plan):
    """A plan of 90 devices over neighbours, and the policy that it keeps to."""
    policy = replace(POLICY, protocols=("complete", "neighbours"), min_cohort=5, colluders=0.2)
    sizes = choose_sizes_between(5, 90, Assumptions(0.2, 0.2, "malicious", hidden=4))
    return policy, make_plan(
        min_cohort=23, max_cohort=90, colluders=18, protocol="neighbours", neighbours=sizes.neighbours,
        threshold=sizes.threshold, partners=sizes.partners, modulus_bits=32,
    )  # fmt: skip


def test_a_plan_over_neighbours(over_neighbours):
    policy, plan = over_neighbours
    check_plan(plan, policy, layout())
    assert least_cohort(plan) == plan.threshold + 1
    # More than the colluders have to sign that they were in it.
    assert endorsers_needed(plan) == plan.threshold
    assert endorsers_needed(replace(plan, colluders=70)) == 71


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"threshold": -1}, "threshold"),
        ({"partners": -1}, "partners"),
        ({"neighbours": -1}, "the threshold or the partners exceed|threshold|partners"),
    ],
)
def test_sizes_below_what_the_policy_calls_for(over_neighbours, change, why):
    policy, plan = over_neighbours
    changed = {name: getattr(plan, name) + less for name, less in change.items()}
    with pytest.raises(PolicyError, match=why):
        check_plan(replace(plan, **changed), policy, layout())


def test_plans_over_neighbours_outside_the_policy(over_neighbours):
    policy, plan = over_neighbours
    for other, changed, why in (
        (replace(policy, protocols=("complete",)), plan, "protocol 'neighbours' is not among"),
        (replace(policy, modes=("plain", "secure")), replace(plan, privacy="plain", colluders=0), "of a plain round"),
        (policy, replace(plan, kind="evaluation", min_cohort=40, min_contributors=20), "for trainings"),
        (replace(policy, min_cohort=40), replace(plan, min_cohort=60), "threshold"),
        (replace(policy, colluders=0.3), replace(plan, colluders=27, min_cohort=60), "threshold"),
    ):
        with pytest.raises(PolicyError, match=why):
            check_plan(changed, other, layout())


def test_a_round_over_the_complete_graph_that_the_publisher_does_not_want(make_plan):
    with pytest.raises(PolicyError, match="protocol 'complete' is not among"):
        check_plan(make_plan(**GOOD), replace(POLICY, protocols=("neighbours",)), layout())
