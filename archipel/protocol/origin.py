"""Where a plan comes from in a tree of servers: every plan below the root's carries the root's own, as it was sealed.

A device at an edge server has the root's key from its enrolment token. So the edge cannot give out a round of its own
for one of the root's, nor change what is trained, and a device recognises a round of the root that it has been in,
whichever edge brings it.
"""

from __future__ import annotations

import msgspec

from archipel.bundle import Manifest
from archipel.errors import PolicyError
from archipel.protocol.messages import Root, RoundPlan
from archipel.protocol.sealed import Sealed, unseal

SAME = (
    "task_id", "number", "bundle", "weights", "broadcast", "hyperparameters", "kind", "program", "narrow",
    "server_noise", "metrics", "distributions", "max_examples", "min_contributors", "count_adoption",
)  # fmt: skip
"""The fields in which a plan says the same as the root's: all that say what devices do, and not with whom."""


def check_origin(plan: RoundPlan, manifest: Manifest, root: Root | None) -> RoundPlan | None:
    """The root's plan, of which `plan` is a part; None for a plan of a server's own.

    `root` is the one that the device, or edge server, pinned when it enrolled (None: its server is the root).

    Raises PolicyError for a plan that is no part of it, and for a training that is a server's own where the bundle is
    trained by a tree; CertificateError or MessageError where the root did not seal the origin.
    """
    if plan.origin is None:
        if root is not None and plan.kind == "training" and manifest.privacy.aggregators is not None:
            raise PolicyError(
                f"plan {plan.round_id}: a training of the server's own; the root alone has bundle {manifest.name!r} "
                "trained, and its plan is not there"
            )
        return None
    if root is None:
        raise PolicyError(f"plan {plan.round_id}: it names a root server, and this device was enrolled with none")
    first = unseal("plan", plan.origin, root.server_key, RoundPlan)
    for name in SAME:
        if getattr(first, name) != getattr(plan, name):
            raise PolicyError(f"plan {plan.round_id}: its {name} is not that of the root's plan {first.round_id}")
    if not first.levels > plan.levels:
        raise PolicyError(
            f"plan {plan.round_id}: with {plan.levels} levels of edge servers, where the root's has {first.levels}"
        )
    if plan.not_after > first.not_after:
        raise PolicyError(f"plan {plan.round_id}: it is good for longer than the root's, {first.not_after}")
    return first


def origin_of(plan: RoundPlan, sealed: Sealed) -> Sealed:
    """What the plans of the level below `plan` carry; `sealed` is that plan."""
    return sealed if plan.origin is None else plan.origin


def local_plan(plan: RoundPlan, above: RoundPlan, sealed: Sealed, *, not_after: int) -> RoundPlan:
    """The plan of an edge's own round that serves the round of `above`, which is sealed as `sealed`.

    `plan` says with whom: its cohort, secret sharing and modulus.
    """
    same = {name: getattr(above, name) for name in SAME}
    ends, levels = min(not_after, above.not_after), above.levels - 1
    return msgspec.structs.replace(plan, **same, not_after=ends, levels=levels, origin=origin_of(above, sealed))
