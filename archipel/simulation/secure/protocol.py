"""The protocol of a simulation's secure rounds, as a server chooses it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from archipel.bundle.manifest import Manifest
from archipel.errors import SimulationError
from archipel.protocol.policy import assumptions_of, choose_protocol
from archipel.protocol.secagg_plus.sizes import Sizes, choose_sizes_between

if TYPE_CHECKING:
    from archipel.simulation.rounds import RoundSettings


def sizes_of_rounds(manifest: Manifest, settings: RoundSettings) -> Sizes | None:
    """The sizes of rounds over neighbours; None where secure rounds are over the complete graph, or rounds plain.

    Raises SimulationError for a protocol that the rounds or the bundle's policy do not allow, PolicyError where no
    number of neighbours is secure.
    """
    policy, asked = manifest.privacy, settings.protocol
    if settings.privacy != "secure":
        if asked is not None:
            raise SimulationError(f"protocol: {asked!r} is of secure rounds, these are plain; leave it out")
        return None
    chosen = asked or choose_protocol(policy, "training", seats_of(settings))
    threshold = settings.pacing.threshold
    if threshold is not None and asked is None and "complete" in policy.protocols:
        # A threshold that somebody states is one of the complete graph.
        chosen = "complete"
    if chosen not in policy.protocols:
        raise SimulationError(
            f"protocol: bundle {manifest.name!r} allows {list(policy.protocols)}, not {chosen!r}; convert it with "
            "another privacy policy"
        )
    if chosen == "complete":
        return None
    sizes = choose_sizes_between(policy.min_cohort, seats_of(settings), assumptions_of(policy))
    if threshold not in (None, sizes.threshold):
        raise SimulationError(
            f"threshold: {threshold}; over neighbours it follows from the bundle's privacy policy and is "
            f"{sizes.threshold}; leave it out"
        )
    return sizes


def seats_of(settings: RoundSettings) -> int:
    """The largest number of devices in one sum: of a group, or of the cohort."""
    return -(-settings.cohort // max(settings.secure_groups, 1))
