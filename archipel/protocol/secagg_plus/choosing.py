"""Which protocol secure rounds take, and with how many neighbours: as a server and as a simulation choose it."""

from __future__ import annotations

from archipel.bundle.manifest import PrivacyPolicy
from archipel.errors import PolicyError
from archipel.protocol.messages import Kind, Protocol, over_neighbours
from archipel.protocol.policy import assumptions_of
from archipel.protocol.secagg_plus import kem
from archipel.protocol.secagg_plus.sizes import Sizes, choose_sizes_between

NEIGHBOURS_FROM = 256
"""Devices of a cohort. In smaller ones nearly all others would be neighbours, where the server may be malicious."""


def choose_protocol(
    policy: PrivacyPolicy, kind: Kind, cohort: int, *, asked: Protocol | None = None, threshold: int | None = None
) -> Protocol:
    """The protocol of secure rounds with at most `cohort` devices in a sum.

    Arguments:
        policy: the bundle's.
        kind: what the rounds are for.
        cohort: the most devices of a cohort, or of a group.
        asked: the one that somebody asks for; None: neighbours for large trainings, where the policy allows them and
            some number of them is secure.
        threshold: the one that somebody asks for.

    Raises PolicyError where the policy, the kind or the threshold do not go with it.
    """
    chosen = asked or _cheapest(policy, kind, cohort, threshold)
    if chosen not in policy.protocols:
        raise PolicyError(
            f"protocol: the bundle's privacy policy allows {list(policy.protocols)}, not {chosen!r}; its publisher can "
            "convert it with another policy"
        )
    if over_neighbours(chosen):
        if kind != "training":
            raise PolicyError(
                f"protocol: {chosen!r} is for trainings; leave it out, and the devices share with all others"
            )
        needed = sizes_between(policy, cohort).threshold
        if threshold not in (None, needed):
            raise PolicyError(
                f"threshold: {threshold}; over neighbours it follows from the bundle's privacy policy and is {needed}; "
                "leave it out"
            )
    return chosen


def sizes_between(policy: PrivacyPolicy, cohort: int) -> Sizes:
    """Those of rounds over neighbours of so many devices, or of fewer if fewer come.

    Raises PolicyError where no number of neighbours is secure.
    """
    return choose_sizes_between(policy.min_cohort, cohort, assumptions_of(policy))


def _cheapest(policy: PrivacyPolicy, kind: Kind, cohort: int, threshold: int | None) -> Protocol:
    # Without ML-KEM it is less to send. A publisher who wants it in any case names no other over neighbours.
    allowed: tuple[Protocol, ...] = ("neighbours", "neighbours-mlkem")
    found = next((protocol for protocol in allowed if protocol in policy.protocols), None)
    if kind != "training" or found is None:
        return "complete"
    if "complete" in policy.protocols:
        # A threshold that somebody states is one of the complete graph.
        if cohort < NEIGHBOURS_FROM or threshold is not None:
            return "complete"
        try:
            sizes_between(policy, cohort)
        except PolicyError:
            return "complete"
    return found


def spoken() -> tuple[Protocol, ...]:
    """The protocols of secure rounds that a device here can take part in."""
    plain: tuple[Protocol, ...] = ("complete", "neighbours")
    return (*plain, "neighbours-mlkem") if kem.is_available() else plain
