"""A plan below the root's says the same as that, or is refused; the policy decides about rounds of sites."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel import bundle as b
from archipel.errors import CertificateError, PolicyError
from archipel.protocol.messages import Bins, Root, RoundPlan
from archipel.protocol.origin import check_origin, local_plan
from archipel.protocol.policy import check_plan
from archipel.protocol.sealed import public_bytes, seal
from archipel.protocol.uploads import plan_layout
from tests.support.linear_bundle import make_bundle

ROOT, OTHER = b.generate_key(), b.generate_key()
PINNED = Root(server_key=public_bytes(ROOT), enrolment_key=bytes(32), population="sites")
SITES = b.Aggregators(min_site_cohort=3, max_site_cohort=8)


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> tuple[b.Manifest, b.Manifest]:
    """One with a policy for sites, one without."""
    folder, key = tmp_path_factory.mktemp("bundles"), b.generate_key()
    made = []
    for name, more in (("tree", {"aggregators": SITES}), ("flat", {})):
        make_bundle(folder / name, key, **more)
        made.append(b.open_bundle(folder / name, [public_bytes(key)]).manifest)
    return made[0], made[1]


def above(**changes: Any) -> RoundPlan:
    values: dict[str, Any] = {
        "round_id": "a" * 32, "task_id": "b" * 32, "number": 2, "bundle": "c" * 64, "weights": "d" * 64,
        "privacy": "secure", "min_cohort": 2, "max_cohort": 3, "threshold": 2, "modulus_bits": 32, "levels": 1,
        "site": 6, "not_after": 1000, "hyperparameters": {"lr": 0.1}, **changes,
    }  # fmt: skip
    return RoundPlan(**values)


def below(key: Ed25519PrivateKey = ROOT, first: RoundPlan | None = None, **changes: Any) -> RoundPlan:
    first = first or above()
    own = RoundPlan(
        round_id="e" * 32, task_id="b" * 32, number=1, bundle="c" * 64, weights="d" * 64, privacy="secure",
        min_cohort=3, max_cohort=4, threshold=3, modulus_bits=32,
    )  # fmt: skip
    return msgspec.structs.replace(local_plan(own, first, seal("plan", first, key), not_after=900), **changes)


def test_a_plan_that_serves_the_root_s_is_taken(manifests: tuple[b.Manifest, b.Manifest]) -> None:
    tree, _ = manifests
    plan = below()
    assert (plan.number, plan.hyperparameters, plan.not_after, plan.levels) == (2, {"lr": 0.1}, 900, 0)
    first = check_origin(plan, tree, PINNED)
    assert first == above()
    check_plan(plan, tree.privacy, plan_layout(plan, tree))
    check_plan(above(), tree.privacy, plan_layout(above(), tree))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"weights": "1" * 64}, "its weights is not that of the root's"),
        ({"task_id": "1" * 32}, "its task_id"),
        ({"hyperparameters": {"lr": 0.5}}, "its hyperparameters"),
        ({"number": 3}, "its number"),
        ({"kind": "evaluation", "metrics": {"mse": 1.0}}, "its kind"),
        ({"levels": 1, "site": 3}, "with 1 levels"),
        ({"not_after": 1001}, "good for longer"),
        ({"origin": None}, "a training of the server's own"),
    ],
)
def test_a_plan_that_says_something_else_is_refused(
    manifests: tuple[b.Manifest, b.Manifest], changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(PolicyError, match=why):
        check_origin(below(**changes), manifests[0], PINNED)


ANALYSIS: dict[str, Any] = {
    "kind": "analytics", "program": "look", "max_examples": 50, "min_contributors": 3, "hyperparameters": {},
}  # fmt: skip
EVALUATION: dict[str, Any] = {
    "kind": "evaluation", "metrics": {"mse": 4.0}, "max_examples": 50, "min_contributors": 3, "hyperparameters": {},
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"metrics": {"mse": 8.0}}, "its metrics"),
        ({"max_examples": 1}, "its max_examples"),
        ({"min_contributors": 2}, "its min_contributors"),
        ({"distributions": {"mse": Bins(low=0.0, high=1.0)}}, "its distributions"),
        ({"count_adoption": True}, "its count_adoption"),
        ({"kind": "training"}, "its kind"),
    ],
)
def test_an_evaluation_asks_what_the_root_asks(
    manifests: tuple[b.Manifest, b.Manifest], changes: dict[str, Any], why: str
) -> None:
    tree, _ = manifests
    first = above(**EVALUATION)
    plan = below(first=first)
    assert check_origin(plan, tree, PINNED) == first
    for each in (first, plan):
        check_plan(each, tree.privacy, plan_layout(each, tree))
    with pytest.raises(PolicyError, match=why):
        check_origin(msgspec.structs.replace(plan, **changes), tree, PINNED)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"max_examples": 1000}, "its max_examples"),
        ({"min_contributors": 2}, "its min_contributors"),
        ({"program": ""}, "its program"),
    ],
)
def test_an_analysis_asks_what_the_root_asks(
    manifests: tuple[b.Manifest, b.Manifest], changes: dict[str, Any], why: str
) -> None:
    tree, _ = manifests
    first = above(**ANALYSIS)
    plan = below(first=first)
    assert check_origin(plan, tree, PINNED) == first
    for each in (first, plan):
        check_plan(each, tree.privacy, plan_layout(each, tree))
    with pytest.raises(PolicyError, match=why):
        check_origin(msgspec.structs.replace(plan, **changes), tree, PINNED)


def test_a_root_that_is_not_the_pinned_one_is_refused(manifests: tuple[b.Manifest, b.Manifest]) -> None:
    with pytest.raises(CertificateError, match="does not verify"):
        check_origin(below(OTHER), manifests[0], PINNED)
    with pytest.raises(PolicyError, match="enrolled with none"):
        check_origin(below(), manifests[0], None)


def test_a_server_s_own_plans_need_no_root(manifests: tuple[b.Manifest, b.Manifest]) -> None:
    tree, flat = manifests
    own = msgspec.structs.replace(below(), origin=None)
    assert check_origin(own, tree, None) is None
    assert check_origin(own, flat, PINNED) is None
    assert check_origin(msgspec.structs.replace(own, kind="evaluation"), tree, PINNED) is None


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (above(site=2), "sites of up to 2 devices, the policy has them from 3 to 8"),
        (above(site=9), "sites of up to 9 devices"),
        (above(levels=2), "2 levels of edge servers, the policy allows 1"),
        (above(min_cohort=1), "min_cohort 1 is below the policy's 2"),
        (above(threshold=1), "threshold 1 of max_cohort 3"),
        (above(modulus_bits=24), "can overflow with max_cohort 3 of up to 6 devices"),
        (above(privacy="plain"), "edge servers are secure, and not asynchronous"),
        (above(**{**ANALYSIS, "min_contributors": 7}), "sites of up to 6 devices, and min_contributors 7 holds"),
        (above(**EVALUATION, count_adoption=True), "adoption is counted at each edge server"),
        (above(**{**EVALUATION, "min_contributors": 0}), "min_contributors 0 is below the policy's 1"),
        (above(**{**EVALUATION, "min_contributors": 7}), "sites of up to 6 devices, and min_contributors 7 holds"),
        (
            below(first=above(**{**EVALUATION, "min_contributors": 4})),
            "min_cohort 3 is below the plan's min_contributo",
        ),
        (above(staleness_exponent=0.5), "not asynchronous"),
        (above(levels=0), "site 6 in a round of devices"),
        (below(min_cohort=2), "min_cohort 2"),
        (below(max_cohort=9, threshold=6), "up to 9 devices in the sum of a site, the policy allows 8"),
    ],
)
def test_what_the_policy_does_not_allow(manifests: tuple[b.Manifest, b.Manifest], plan: RoundPlan, why: str) -> None:
    tree, _ = manifests
    with pytest.raises(PolicyError, match=why):
        check_plan(plan, tree.privacy, plan_layout(plan, tree))


def test_a_policy_without_sites_allows_none(manifests: tuple[b.Manifest, b.Manifest]) -> None:
    _, flat = manifests
    for plan in (above(), below()):
        with pytest.raises(PolicyError, match="allows no rounds among edge servers"):
            check_plan(plan, flat.privacy, plan_layout(plan, flat))


@pytest.mark.parametrize(
    "sites",
    [
        {"min_site_cohort": 2}, {"max_site_cohort": 2}, {"max_site_cohort": 2**20 + 1}, {"min_cohort": 1},
        {"threshold": 0.5}, {"colluders": 1.0}, {"levels": 0}, {"levels": 4},
    ],
)  # fmt: skip
def test_a_policy_for_sites_has_bounds(tmp_path: Path, sites: dict[str, Any]) -> None:
    from archipel.errors import ManifestError

    with pytest.raises(ManifestError, match="aggregators"):
        make_bundle(tmp_path / "made", b.generate_key(), aggregators=msgspec.structs.replace(SITES, **sites))
