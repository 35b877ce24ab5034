"""What a device at an edge server takes for a round of the root's, and what it refuses: plans, and steps of the log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from archipel.bundle import Aggregators, Manifest, PrivacyPolicy
from archipel.errors import ArchipelError
from archipel.protocol import device_id, issue_identity, mint_token, public_bytes, seal
from archipel.protocol.identity import Kind
from archipel.protocol.messages import (
    Bins,
    Confirmation,
    Endorsement,
    Endorser,
    Root,
    RoundPlan,
    ServerNoise,
    Survivors,
    WeightsStatement,
)
from archipel.protocol.origin import check_origin, local_plan
from archipel.protocol.policy import check_plan, plan_digest
from archipel.protocol.provenance import History, LogReader, Node, check_endorsement
from archipel.protocol.sealed import Sealed, encode, signed_bytes
from archipel.protocol.secagg.checks import survivors_digest
from archipel.protocol.uploads import plan_layout
from protocol_vectors.inputs import Json, fixed, plain, signing_key
from protocol_vectors.steps import UPDATES, make_manifest, plain_port

ROOT, EDGE, ENROLMENT = signing_key("root server"), signing_key("edge server"), signing_key("root's enrolment")
POPULATION, OWN = "hospitals", fixed("own weights").hex()
PINNED = Root(server_key=public_bytes(ROOT), enrolment_key=public_bytes(ENROLMENT), population=POPULATION)
SITES = Aggregators(min_site_cohort=4, max_site_cohort=40, min_cohort=2, threshold=0.6, levels=2)
POLICY = PrivacyPolicy(
    modes=("secure",), min_cohort=3, threshold=0.67, max_clip=10.0, max_bits=24, max_server_lr=2.0, colluders=0.0,
    aggregators=SITES,
)  # fmt: skip
FLAT = msgspec.structs.replace(POLICY, aggregators=None)

ABOVE = RoundPlan(
    round_id=fixed("round of the root", 16).hex(), task_id=fixed("task", 16).hex(), number=2,
    bundle=fixed("bundle").hex(), weights=OWN, privacy="secure", min_cohort=2, max_cohort=3, threshold=2,
    modulus_bits=24, hyperparameters={"lr": 0.1, "momentum": 0.9}, serial=2, not_after=2_000_000_000, levels=1, site=20,
)  # fmt: skip
SEALED = seal("plan", ABOVE, ROOT)
MIDDLE = msgspec.structs.replace(ABOVE, round_id=fixed("round of the middle", 16).hex(), levels=1, site=6)


def plan_of(above: RoundPlan = ABOVE, sealed: Sealed = SEALED, **changes: Any) -> RoundPlan:
    """An edge server's plan for its devices."""
    own = RoundPlan(
        round_id=fixed("round of the edge", 16).hex(), task_id=above.task_id, number=above.number, bundle=above.bundle,
        weights=above.weights, privacy="secure", min_cohort=4, max_cohort=6, threshold=5, modulus_bits=24, serial=7,
    )  # fmt: skip
    made = local_plan(own, above, sealed, not_after=1_999_999_000)
    return msgspec.structs.replace(made, **changes)


def tree_vectors() -> Json:
    updates = [plain_port(port) for port in UPDATES["weighted"]]
    history = {"number": 1, "weights": OWN, "task": ABOVE.task_id}
    return {
        "root": plain(PINNED), "policy": plain(POLICY), "updates": updates, "start": history,
        "origins": list(_origins()), "policies": list(_policies()), "steps": list(_steps()),
    }  # fmt: skip


def _manifest(policy: PrivacyPolicy) -> Manifest:
    return msgspec.structs.replace(make_manifest("fedavg", "weighted"), privacy=policy)


def _error(work: Callable[[], object]) -> str:
    try:
        work()
    except ArchipelError as error:
        return type(error).__name__
    return ""


def _origins() -> Iterator[Json]:
    """`tree`: the policy has a part for edge servers; `pinned`: the device enrolled with the root's key."""
    deep = msgspec.structs.replace(ABOVE, levels=2)
    swapped = msgspec.structs.replace(ABOVE, hyperparameters={"momentum": 0.9, "lr": 0.1})
    other = {
        "task_id": fixed("other task", 16).hex(), "number": 3, "bundle": fixed("other bundle").hex(),
        "weights": fixed("other weights").hex(), "broadcast": fixed("broadcast").hex(), "hyperparameters": {"lr": 0.1},
        "kind": "evaluation", "program": "other", "narrow": True,
        "server_noise": ServerNoise(mechanism="central", multiplier=1.0, epsilon=2.0, delta=1e-6),
        "metrics": {"loss": 1.0}, "distributions": {"loss": Bins(low=0.0, high=1.0)}, "max_examples": 7,
        "min_contributors": 2, "count_adoption": True,
    }  # fmt: skip
    changed = {f"another {name}": plan_of(**{name: value}) for name, value in other.items()}
    cases: list[tuple[str, RoundPlan, bool, bool]] = [
        ("of the root", plan_of(), True, True),
        ("of a tree of two levels", plan_of(deep, seal("plan", deep, ROOT), levels=0), True, True),
        ("with keys in another order", plan_of(sealed=seal("plan", swapped, ROOT)), True, True),
        ("a flat plan at the root", plan_of(origin=None), False, True),
        ("a flat plan at an edge server, of a bundle for one server", plan_of(origin=None), True, False),
        ("a training of the edge's own", plan_of(origin=None), True, True),
        ("an evaluation of the edge's own", plan_of(origin=None, kind="evaluation"), True, True),
        ("a root that the device does not know", plan_of(), False, True),
        ("sealed by the edge", plan_of(sealed=seal("plan", ABOVE, EDGE)), True, True),
        ("sealed as an offer", plan_of(sealed=seal("offer", ABOVE, ROOT)), True, True),
        ("good for longer", plan_of(not_after=ABOVE.not_after + 1), True, True),
        ("of no tree", plan_of(sealed=seal("plan", msgspec.structs.replace(ABOVE, levels=0), ROOT)), True, True),
        *((name, plan, True, True) for name, plan in changed.items()),
    ]
    for name, plan, pinned, tree in cases:
        found: list[RoundPlan | None] = []

        def work(plan: RoundPlan = plan, pinned: bool = pinned, tree: bool = tree, found: Any = found) -> None:
            found.append(check_origin(plan, _manifest(POLICY if tree else FLAT), PINNED if pinned else None))

        error = _error(work)
        origin = found[0].round_id if found and found[0] is not None else None
        yield {
            "name": name, "plan": plain(plan), "pinned": pinned, "tree": tree, "error": error, "origin": origin,
        }  # fmt: skip


def _policies() -> Iterator[Json]:
    cases: list[tuple[str, RoundPlan, bool]] = [
        ("a site's round", plan_of(), True),
        ("the root's round", ABOVE, True),
        ("a round in the middle", msgspec.structs.replace(MIDDLE, origin=SEALED), True),
        ("a policy without edge servers", plan_of(), False),
        ("the root's round by a policy without", ABOVE, False),
        ("fewer devices than a site has", plan_of(min_cohort=3), True),
        ("more devices than a site has", plan_of(max_cohort=41, threshold=28), True),
        ("a site in a round of devices", plan_of(site=2), True),
        ("too many levels", msgspec.structs.replace(ABOVE, levels=3), True),
        ("as many levels as there may be", msgspec.structs.replace(ABOVE, levels=2), True),
        ("sites that are too small", msgspec.structs.replace(ABOVE, site=3), True),
        ("sites that are too large", msgspec.structs.replace(ABOVE, site=41), True),
        ("a middle whose devices are too many", msgspec.structs.replace(MIDDLE, origin=SEALED, site=20), True),
        ("too few sites", msgspec.structs.replace(ABOVE, min_cohort=1), True),
        ("a threshold below that of sites", msgspec.structs.replace(ABOVE, max_cohort=4), True),
        ("over neighbours among sites", msgspec.structs.replace(ABOVE, protocol="neighbours", neighbours=2), True),
        ("contributors in each site", msgspec.structs.replace(ABOVE, min_contributors=20), True),
        ("contributors beyond a site", msgspec.structs.replace(ABOVE, min_contributors=21), True),
        ("a modulus that overflows", msgspec.structs.replace(ABOVE, modulus_bits=21), True),
        ("a modulus that is just enough", msgspec.structs.replace(ABOVE, modulus_bits=22), True),
        ("a plain one", plan_of(privacy="plain", threshold=1, colluders=0), True),
        ("an asynchronous one", plan_of(staleness_exponent=0.5), True),
        ("a buffered one", plan_of(buffered=True), True),
    ]
    for name, plan, tree in cases:
        policy = POLICY if tree else FLAT

        def work(plan: RoundPlan = plan, policy: PrivacyPolicy = policy) -> None:
            check_plan(plan, policy, plan_layout(plan, _manifest(policy)))

        yield {"name": name, "plan": plain(plan), "tree": tree, "error": _error(work)}


def _steps() -> Iterator[Json]:
    """Steps that three sites made; `leaves`: how many devices the entry says that they have."""
    flat = {"levels": 0, "site": 1, "min_cohort": 3, "threshold": 3}
    for name, kind, leaves, changes in [
        ("by sites", "aggregator", 27, {}),
        ("of as few devices as there may be", "aggregator", 12, {}),
        ("of as many devices as there may be", "aggregator", 60, {}),
        ("of fewer devices", "aggregator", 11, {}),
        ("of more devices", "aggregator", 61, {}),
        ("signed by devices", "device", 27, {}),
        ("of devices, with leaves", "device", 3, flat),
        ("of devices", "device", 0, flat),
        ("of devices, signed by edge servers", "aggregator", 0, flat),
        ("of sites beyond the policy", "aggregator", 27, {"site": 41}),
    ]:
        kinds: Kind = "aggregator" if kind == "aggregator" else "device"
        entry, evidence = _step(kinds, leaves, msgspec.structs.replace(ABOVE, **changes))
        node = Node(number=1, weights=OWN, task=ABOVE.task_id, parent=0, bound=0.0, plain=False, again=1)
        history = History(population=POPULATION, bundle=ABOVE.bundle, number=1, nodes=(node,))
        log = LogReader(history, OWN, public_bytes(ROOT), lambda entry: 1.0)

        def work(entry: WeightsStatement = entry, evidence: Endorsement = evidence, log: LogReader = log) -> None:
            check_endorsement(
                entry, evidence, _manifest(POLICY), log, server_key=PINNED.server_key,
                enrolment_key=PINNED.enrolment_key,
            )  # fmt: skip

        yield {"name": name, "entry": plain(entry), "evidence": plain(evidence), "error": _error(work)}


def _step(kind: Kind, leaves: int, plan: RoundPlan) -> tuple[WeightsStatement, Endorsement]:
    sealed = seal("plan", plan, ROOT)
    keys = [signing_key(f"member {number}") for number in range(3)]
    survivors = Survivors(devices=sorted(device_id(public_bytes(key)) for key in keys))
    confirmation = encode(
        Confirmation(
            round_id=plan.round_id, plan=plan_digest(sealed), cohort=fixed("cohort").hex(),
            complaints=fixed("complaints").hex(), survivors=survivors_digest(survivors),
        )
    )  # fmt: skip
    endorsers = []
    for number, key in enumerate(keys):
        seed = fixed(f"member's token {number}")
        token = mint_token(ENROLMENT, population=POPULATION, not_after=2_000_000_000, seed=seed, kind=kind)
        signature = key.sign(signed_bytes("confirmation", confirmation))
        endorsers.append(Endorser(chain=issue_identity(seed, token, public_bytes(key)), signature=signature))
    entry = WeightsStatement(
        population=POPULATION, bundle=plan.bundle, number=2, previous="0" * 64, kind="step",
        weights=fixed("new weights").hex(), task_id=plan.task_id, parent=OWN, round_id=plan.round_id,
        plan=plan_digest(sealed), devices=len(keys), leaves=leaves,
    )  # fmt: skip
    return entry, Endorsement(plan=sealed, survivors=survivors, confirmation=confirmation, endorsers=endorsers)
